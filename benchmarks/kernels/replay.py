"""How kernels are timed here: by replays of a CUDA graph, beside the bytes that the card can move."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def replayed(calls: list[Callable[[], object]], repeats: int) -> dict[str, float]:
    """Microseconds of one call, from replays of a graph that holds all of them: median, least, most.

    Give one call per input set, of sets that are together several times the L2 cache.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def copy_bandwidth() -> float:
    """Bytes per second, reads and writes, of a large copy. Not in a graph: there the copy engine does it, which is slower."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.nbytes / statistics.median(times[2:])
