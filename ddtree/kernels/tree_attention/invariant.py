"""Tree attention whose rows have the same bits in a tree, a plain step and a prompt's chunk, alone or beside others.

Letters as in `pooled`, and A places of a row's lineage. What a row attends to goes by its position alone: its last A
tokens (its *tail*) are gathered by its lineage, in order, wherever they lie; those before (its *body*) are committed and
lie in order in the pages, cut into splits whose bounds are places of the sequence.
"""

from __future__ import annotations

import torch

from ddtree.kernels.tree_attention.invariant_reference import tree_attention_invariant_reference
from ddtree.kernels.tree_attention.pooled import check_attention

NUM_SPLITS = 16  # most splits of a body
LEAST_REACH = 16  # places of a lineage: the tokens that a tensor core's instruction adds up


def tree_attention_invariant(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    context_lengths: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    lineage: torch.Tensor,
    scale: float,
    max_rows: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from every row to the tokens of its own path, itself included.

    Args:
        query, key_pages, value_pages, page_table, slots, starts, context_lengths, max_rows, scale: as in
            `tree_attention_pooled`.
        positions: [R] int32; a row's context length + depth.
        row_slots: [R] int32; -1 for padding, which comes out as 0.
        lineage: [R, A] int32, see `lineage_pooled`; A is a power of two of at least 16, and no row has A staged ancestors
            that are not its own last ones.
        out: [R, H, D] to write to.

    Returns:
        [R, H, D] in query's dtype; `out` where given.
    """
    check_attention(query, key_pages, value_pages, None, None, False)
    if key_pages.shape[1] == 1:
        raise ValueError("page size must be at least 16 here, got 1")
    reach = lineage.shape[1]
    if reach < LEAST_REACH or reach & (reach - 1):
        raise ValueError(f"the lineage's reach must be a power of two of at least {LEAST_REACH}, got {reach}")
    if query.is_cuda:
        from ddtree.kernels.tree_attention.triton_invariant import tree_attention_invariant_triton as attend
    else:
        attend = tree_attention_invariant_reference
    return attend(
        query, key_pages, value_pages, page_table, slots, starts, context_lengths, positions, row_slots, lineage, scale,
        max_rows, out=out,
    )  # fmt: skip
