"""The served target's own forward, one sequence at a time: what the dense one is compared with."""

from __future__ import annotations

import torch

from ddtree.caches.rows import Rows, Span


def packed_forward(model, token_ids: torch.Tensor, taps: tuple[int, ...]):
    """`[T]` ids -> features `[T, L C]` and hidden `[T, C]` through the packed forward of `models`."""
    count = len(token_ids)
    span = Span(model.new_cache(), 0, count, None, None)
    with torch.no_grad():
        output = model(Rows(token_ids, torch.arange(count), (span,)), taps)
    return output.features, output.hidden
