"""Every Triton kernel compiles for the GPUs that people have, within the shared memory of the smallest of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MOST_SHARED = 99 * 1024  # of one block on sm_86, sm_89 and sm_120
FOLDER = Path(__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("launches_*.py"))


def compiled(module: str, sm: int) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiling", f"tests.kernels.{module}", str(sm)]
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None or shutil.which("ptxas") is None, reason="needs triton and ptxas")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("sm", [80, 89, 90, 120])
def test_kernels_compile_and_fit(module, sm):
    kernels = compiled(module, sm)
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= MOST_SHARED, kernel
