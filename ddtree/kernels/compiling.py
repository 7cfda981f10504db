"""Compile Triton kernels before they are launched, on all cores.

Triton compiles a kernel when it is first launched, and whoever launches it waits: a new round shape brings about ten kernels of
half a second each. A *rehearsal* is the same Python with nothing launched: each launch only says which kernel it would take, and
threads compile those side by side (most of a compilation holds no interpreter lock). What is not found so is compiled at its
launch, as ever.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

logger = logging.getLogger("ddtree")

MOST_THREADS = 32
ANNOUNCED_AFTER = 1.0  # seconds: what is in Triton's cache on disk is read in less
UNWRITTEN = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
REHEARSING = threading.Lock()  # one rehearsal at a time has Triton's launches replaced


class Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, and make them ready for `device`."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        on_device = {"initializer": torch.cuda.set_device, "initargs": (index_of(device),)} if device.type == "cuda" else {}
        super().__init__(num_threads, thread_name_prefix="compile", **on_device)
        self.futures: list[Future] = []

    def submit(self, compile_kernel: Callable[[], object]) -> Future:
        self.futures.append(super().submit(lambda: made_ready(compile_kernel())))
        return self.futures[-1]


class Zeroed(TorchFunctionMode):
    """New tensors that a kernel would have filled hold zeros, valid as tokens, rows, slots and lengths alike."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in UNWRITTEN else result


def compile_ahead(rehearsals: Iterable[Callable[[], None]], device: torch.device, num_threads: int | None = None) -> int:
    """Run each of `rehearsals`, none of whose kernels is launched, and compile all of these; how many were new to this process.

    A rehearsal may read and write device memory as its plain torch operations do. Whatever fails here is left to the launch
    itself, where it is raised with its own message; the same where Triton has no asynchronous compilation.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import KernelInterface
    except ImportError:
        return 0
    num_threads = num_threads or min(num_cores(), MOST_THREADS)
    with Compilers(device, num_threads) as compilers:
        try:
            with AsyncCompileMode(compilers, ignore_errors=True):
                with launching_nothing(KernelInterface), Zeroed(), torch.inference_mode():
                    for rehearse in rehearsals:
                        rehearse()
                _, left = wait(compilers.futures, timeout=ANNOUNCED_AFTER)
                if left:
                    logger.info("compiling %d kernels on %d threads, once for this machine", len(left), num_threads)
        except Exception as error:
            logger.warning("kernels are compiled one after another: %s: %s", type(error).__name__, error)
        return len(compilers.futures)


@contextmanager
def launching_nothing(kernels: type) -> Iterator[None]:
    """`kernel[grid](...)` compiles the kernel for these arguments, and that is all; other threads launch as ever."""
    rehearsing, seen = threading.get_ident(), set()

    def instead(kernel, grid):
        if threading.get_ident() != rehearsing:
            return launching(kernel, grid)

        def compile_once(*args, **kwargs) -> None:
            looks = (kernel, *map(look, args), *((name, look(value)) for name, value in kwargs.items()))
            if looks not in seen:  # layer after layer launches the same
                seen.add(looks)
                kernel.run(*args, grid=grid, warmup=True, **kwargs)

        return compile_once

    with REHEARSING:
        launching = kernels.__getitem__
        kernels.__getitem__ = instead
        try:
            yield
        finally:
            kernels.__getitem__ = launching


def look(value) -> tuple:
    """All of an argument that a kernel may be compiled for: of a tensor, its dtype and whether it is aligned."""
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else (type(value), value)


def made_ready(kernel):
    """A compiled kernel with its launcher, which takes a run of the C compiler, and its code on the device."""
    _ = kernel.run
    return kernel


def index_of(device: torch.device) -> int:
    """The number of a CUDA device, which `cuda` alone does not say."""
    return torch.cuda.current_device() if device.index is None else device.index


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
