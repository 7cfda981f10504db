"""CUDA graphs: a function over static buffers, captured once and replayed with one launch.

Replaying skips Python and a thousand launches. The function may read and write device memory of fixed address only, and
must not wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

WARM_UPS = 2  # runs before a capture: Triton compiles, cuBLAS makes its workspaces


class Graph:
    """`work` captured on a CUDA device, or simply called where graphs are off or the device is a CPU."""

    def __init__(
        self, work: Callable[[], None], device: torch.device, enabled: bool = True, pool=None, warm_ups: int = WARM_UPS
    ) -> None:
        self._work, self._graph = work, None
        if not enabled or device.type != "cuda":
            return
        # On a stream of its own, as capture demands; what it did to the buffers is the caller's to make harmless.
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), torch.inference_mode():
            for _ in range(warm_ups):
                work()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
            work()
        self._graph = graph

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def replay(self) -> None:
        """Queue the work; returns before the device has done it."""
        if self._graph is not None:
            self._graph.replay()
        else:
            with torch.inference_mode():
                self._work()


class Marks:
    """Times between points of captured work: events that the graph itself records, or the host's clock without a GPU."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names, self._cuda = names, device.type == "cuda"
        count = len(names) + 1
        self._events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(count)] if self._cuda else None
        self._times = [0.0] * count

    def __call__(self, index: int) -> None:
        """Mark the end of part `index` - 1, and the start of part `index`."""
        if self._cuda:
            self._events[index].record()
        else:
            self._times[index] = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Of each part; once the work is done."""
        if self._cuda:
            spans = [a.elapsed_time(b) / 1000 for a, b in pairwise(self._events)]
        else:
            spans = [b - a for a, b in pairwise(self._times)]
        return dict(zip(self.names, spans, strict=True))


def bucket_of(value: int, buckets: tuple[int, ...]) -> int:
    """The least bucket that holds `value`. ValueError where none does."""
    for bucket in buckets:
        if value <= bucket:
            return bucket
    raise ValueError(f"no bucket holds {value}; the largest is {buckets[-1]}")
