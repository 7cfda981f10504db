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
    """Bytes per second, reads and writes, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (replayed([lambda: target.copy_(source)], 10)["median"] * 1e-6)
