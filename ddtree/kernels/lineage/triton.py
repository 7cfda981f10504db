"""Lineages in Triton: a program walks up from a tile of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32


@triton.jit(do_not_specialize=["num_rows"])
def _lineage_kernel(
    row_slots, row_indices, parents, lineage, num_rows, ROWS: tl.constexpr, REACH: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    alive = tl.load(row_slots + row, mask=inside, other=-1) >= 0
    place = tl.load(row_indices + row, mask=inside, other=0)
    first = row - place
    for back in range(REACH):
        tl.store(lineage + row * REACH + (REACH - 1 - back), tl.where(alive, place, 0), mask=inside)
        if parents is None:
            place -= 1
        else:
            staged = alive & (place >= 0)
            place = tl.where(staged, tl.load(parents + first + place, mask=staged, other=0), place - 1)


def lineage_pooled_triton(
    row_slots: torch.Tensor,
    row_indices: torch.Tensor,
    parents: torch.Tensor | None,
    reach: int,
) -> torch.Tensor:
    """Same arguments and result as `lineage_pooled`."""
    num_rows = len(row_slots)
    lineage = torch.empty(num_rows, reach, dtype=torch.int32, device=row_slots.device)
    if num_rows:
        _lineage_kernel[(triton.cdiv(num_rows, ROWS),)](
            row_slots, row_indices, parents, lineage, num_rows, ROWS=ROWS, REACH=reach, num_warps=1
        )
    return lineage
