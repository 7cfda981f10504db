"""Launches of the conditioning kernels at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

import torch

from ddtree.kernels.conditioning import AdapterWeights
from ddtree.kernels.conditioning.triton import transitions_pooled_triton


def transitions(size, rank, num_candidates, dtype, depths=15, num_ancestors=1):
    def launch() -> None:
        each = ((size, size), (size,), (rank + 2, size), (rank + 2,))
        sizes = ((num_ancestors, 1000, size), (1000, rank), *((num_ancestors, *shape) for shape in each))
        weights = AdapterWeights(*(torch.empty(shape, dtype=dtype) for shape in sizes))
        ids = torch.zeros(1, depths, num_candidates, dtype=torch.int64)
        places, roots = torch.empty(num_ancestors, 1, depths, size, dtype=dtype), torch.zeros(1, dtype=torch.int64)
        transitions_pooled_triton(places, roots, ids, ids.float(), ids.float(), torch.ones(1), weights)

    return launch


def launches():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size, rank in ((512, 256), (1024, 512), (128, 64)):
            yield f"{dtype}, width {size}, rank {rank}", transitions(size, rank, 64, dtype)
        yield f"{dtype}, grandparents too", transitions(512, 256, 64, dtype, num_ancestors=2)
    yield "few candidates", transitions(512, 256, 5, torch.bfloat16, depths=2)
