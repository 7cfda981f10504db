"""The path of a chain in Triton: one program a sequence walks the depths, a row of scores at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.conditioning.weights import PathScores
from ddtree.kernels.tree_build.chain import tables_of


@triton.jit
def _best_path_kernel(token_ids, below_parent, below_grandparent, norms, out_ids, out_log_probs, depths, width,
                      GRANDPARENTS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    table = b * depths * width * width
    candidate = tl.arange(0, WIDTH)
    within = candidate < width
    parent, grandparent = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for depth in range(depths):
        score = tl.load(below_parent + table + parent * width + candidate, mask=within, other=float("-inf"))
        if GRANDPARENTS:
            score += tl.load(below_grandparent + table + grandparent * width + candidate, mask=within, other=0.0)
            score -= tl.load(norms + table + grandparent * width + parent)
        score = tl.where(score == score, tl.minimum(score, 0.0), float("-inf"))
        best = tl.max(score, axis=0)
        grandparent = parent
        parent = tl.min(tl.where(score == best, candidate, WIDTH), axis=0)
        place = b * depths + depth
        tl.store(out_ids + place, tl.load(token_ids + place * width + parent))
        tl.store(out_log_probs + place, best)
        table += width * width


def best_path_pooled_triton(token_ids: torch.Tensor, scores: torch.Tensor | PathScores) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments as `best_path_pooled`."""
    num_sequences, depths, width = token_ids.shape
    tables = [table.contiguous() for table in tables_of(scores)]
    token_ids = token_ids.contiguous()
    path = torch.empty(num_sequences, depths, 1, dtype=torch.int64, device=token_ids.device)
    log_probs = torch.empty_like(path, dtype=torch.float32)
    _best_path_kernel[(num_sequences,)](
        token_ids, tables[0], tables[-2 if len(tables) > 1 else 0], tables[-1], path, log_probs, depths, width,
        GRANDPARENTS=len(tables) > 1, WIDTH=triton.next_power_of_2(width), num_warps=2,
    )  # fmt: skip
    return path, log_probs
