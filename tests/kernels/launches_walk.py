"""Launches of the gated delta rule's walks at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

import torch

from ddtree.kernels.gated_delta import COMMITS, NODES, TOKENS, Walks
from ddtree.kernels.gated_delta.triton_walk import walk
from tests.kernels.launches_recurrent import LARGE, SMALL, delta_inputs, integers


def walked(shape, kind: int, rows: int, dtype: torch.dtype):
    def launch() -> None:
        mixed, log_decay, beta, states, out = delta_inputs(shape, rows, dtype)
        walks = Walks(kind, integers(rows), integers(rows), integers(rows, 16), integers(rows), integers(rows))
        walk(mixed[None], log_decay[None], beta[None], states[None], walks, shape, out)

    return launch


def launches():
    for dtype in (torch.bfloat16, torch.float32):
        for name, kind in (("nodes", NODES), ("tokens", TOKENS), ("commits", COMMITS)):
            yield f"{name} of the 27B, {dtype}", walked(LARGE, kind, 65, dtype)
        yield f"a small one, {dtype}", walked(SMALL, NODES, 1, dtype)
