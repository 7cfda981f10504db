"""The obvious twin: from each row up, one parent after another."""

from __future__ import annotations

import torch


def lineage_pooled_reference(
    row_slots: torch.Tensor,
    row_indices: torch.Tensor,
    parents: torch.Tensor | None,
    reach: int,
) -> torch.Tensor:
    """Same arguments and result as `lineage_pooled`."""
    lineage = torch.zeros(len(row_slots), reach, dtype=torch.int32)
    for row, (slot, index) in enumerate(zip(row_slots.tolist(), row_indices.tolist(), strict=True)):
        if slot < 0:
            continue
        place = index
        for column in reversed(range(reach)):
            lineage[row, column] = place
            staged = place >= 0 and parents is not None
            place = int(parents[row - index + place]) if staged else place - 1
    return lineage
