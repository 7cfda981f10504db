"""What every test starts from: fixed seeds, and the real SmolLM2 where its weights are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: threads that spin while they wait cost milliseconds per operation on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before triton is imported: without a GPU its kernels run in its interpreter.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


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


@pytest.fixture(scope="session")
def qwen3():
    """Qwen3's real tokenizer and chat template; without them a failure where `CI` is set, else a skip."""
    from ddtree.text import Tokenizer
    from tests import qwen3_files

    if not qwen3_files.at_hand():
        missing = f"{qwen3_files.folder()} lacks Qwen3's tokenizer; `python -m tests.qwen3_files` puts it there"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    return Tokenizer.load(qwen3_files.folder())


@pytest.fixture(scope="session")
def qwen3_5(qwen3):
    """Qwen3.5's real chat template over Qwen3's tokenizer, which has its special tokens."""
    import copy

    from ddtree.text import Tokenizer
    from tests.qwen3_files import TEMPLATES

    pretrained = copy.copy(qwen3.pretrained)
    pretrained.chat_template = (TEMPLATES / "qwen3_5.jinja").read_text(encoding="utf-8")
    return Tokenizer(pretrained)
