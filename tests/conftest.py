"""What every test starts from: fixed seeds, and the real SmolLM2 where its weights are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: threads that spin while they wait cost milliseconds per operation on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF in the cache (`DDTREE_CACHE` or the per-user one); skips without it."""
    from ddtree.sources.embedded import embedded

    path = embedded("smollm2").path
    if not path.is_file():
        pytest.skip(f"{path} is not there; `ddtree fetch smollm2` puts it there")
    return path
