"""The obvious twin: one row after another, each over the tokens of its own path, in order."""

from __future__ import annotations

import torch

from ddtree.kernels.tree_attention.pooled_reference import attend, gather_pages


def tree_attention_invariant_reference(
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
    """Same arguments and result as `tree_attention_invariant`; `slots`, `starts` and `max_rows` do not matter here."""
    out = torch.empty_like(query) if out is None else out
    for row, (slot, position) in enumerate(zip(row_slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            out[row] = 0
            continue
        tail = lineage[row, -(position + 1) :] + context_lengths[slot]
        body = torch.arange(position + 1 - len(tail), device=query.device)
        places = torch.cat((body, tail))
        keys, values = (gather_pages(pages, page_table[slot], places) for pages in (key_pages, value_pages))
        visible = torch.ones(1, position + 1, dtype=torch.bool, device=query.device)
        out[row] = attend(query[row : row + 1], keys, values, visible, scale)[0]
    return out
