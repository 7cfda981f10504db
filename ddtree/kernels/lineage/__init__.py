"""Who a row's last ancestors are: what lets a tree's node be computed as if its path were a text of consecutive tokens.

Letters: R packed rows, A places a row's lineage has. Index tensors are int32; nothing is looked at by the
host. A CUDA tensor goes to the Triton kernel, any other to the twin.
"""

from __future__ import annotations

import torch

from ddtree.kernels.lineage.reference import lineage_pooled_reference

__all__ = ["lineage_pooled", "lineage_pooled_reference"]


def lineage_pooled(
    row_slots: torch.Tensor,
    row_indices: torch.Tensor,
    parents: torch.Tensor | None,
    reach: int,
) -> torch.Tensor:
    """Where the tokens at each row's last `reach` positions lie, its own last: [R, A].

    Places are relative to the sequence's context length: 0 and above are staged rows of its own, by their local index,
    below zero committed tokens (below minus the context length: there is none). Rows of slot -1 get zeros.

    Args:
        row_slots, row_indices: [R], a row's slot and its place inside its sequence's rows.
        parents: [R], local index of the parent, -1 at the root; None for consecutive rows.
    """
    if reach < 1:
        raise ValueError(f"reach must be >= 1, got {reach}")
    if row_slots.is_cuda:
        from ddtree.kernels.lineage.triton import lineage_pooled_triton as run
    else:
        run = lineage_pooled_reference
    return run(row_slots, row_indices, parents, reach)
