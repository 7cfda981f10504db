"""Compile Triton kernels for GPUs that are not there: whatever a function launches is compiled and not run.

    python -m tests.kernels.compiling tests.kernels.launches_attention [sm ...]

The module's `launches()` yields (name, function without arguments); each is called once per architecture, with tensors
on the CPU. Prints one JSON object per compiled kernel: launch, kernel, sm, shared (bytes), registers, spilled (bytes).
Not under TRITON_INTERPRET, which has to be decided before triton is imported: hence a process of its own.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

ARCHITECTURES = (80, 89, 90, 120)


class AbsentGpu:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_device(self) -> int:
        return self.sm

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)


def compile_launches(function, sm: int) -> list[dict]:
    """What each launch inside `function()` compiles to for architecture `sm`."""
    compiled = []

    def compile_only(self, grid):
        def launch(*args, **kwargs):
            compiled.append(self.run(*args, grid=grid, warmup=True, **kwargs))

        return launch

    driver.set_active(AbsentGpu(sm))
    launching = KernelInterface.__getitem__
    KernelInterface.__getitem__ = compile_only
    try:
        function()
    finally:
        KernelInterface.__getitem__ = launching
    return [describe(kernel) for kernel in compiled]


def describe(kernel) -> dict:
    """Shared memory from the compiler; registers and spills from the machine code."""
    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([binary, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    figures = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "kernel": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "registers": figures["REG"],
        "spilled": figures["LOCAL"] + figures["STACK"],
    }


def main(module: str, *architectures: str) -> None:
    for name, function in importlib.import_module(module).launches():
        for sm in map(int, architectures or ARCHITECTURES):
            for facts in compile_launches(function, sm):
                print(json.dumps({"launch": name, "sm": sm} | facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
