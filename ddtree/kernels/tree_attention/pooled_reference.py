"""The obvious twins of the pooled functions: one sequence at a time, its keys gathered from the pages."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def tree_attention_pooled_reference(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    context_lengths: torch.Tensor,
    ancestor_mask: torch.Tensor | None,
    scale: float,
    max_rows: int,
    *,
    window: int | None = None,
    bidirectional: bool = False,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same arguments and result as `tree_attention_pooled`; `max_rows` and `workspace` do not matter here."""
    out = torch.zeros_like(query) if out is None else out
    for slot, start, stop in zip(slots.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        num_rows = stop - start
        if ancestor_mask is not None and num_rows:
            # What does not see its sequence's root is padding.
            num_rows = int(ancestor_mask[start:stop, 0].bool().sum())
            out[start + num_rows : stop] = 0
        if num_rows == 0 or slot < 0:
            continue
        committed = int(context_lengths[slot])
        places = torch.arange(committed + num_rows, device=query.device)
        keys, values = (gather_pages(pages, page_table[slot], places) for pages in (key_pages, value_pages))
        rows = slice(start, start + num_rows)
        if ancestor_mask is None:
            visible = visible_places(num_rows, committed, window, bidirectional, query.device)
        else:
            visible = F.pad(ancestor_mask[rows, :num_rows].bool(), (committed, 0), value=True)
        out[rows] = attend(query[rows], keys, values, visible, scale)
    return out


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """`query` [n, H, D] over `keys`, `values` [T, Hkv, D] where `visible` [n, T] -> [n, H, D]."""
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)


def visible_places(
    num_rows: int, committed: int, window: int | None, bidirectional: bool, device: torch.device
) -> torch.Tensor:
    """[n, committed + n] bool: which places each of n consecutive rows sees."""
    places = torch.arange(committed + num_rows, device=device)
    distance = places[committed:, None] - places
    visible = torch.ones_like(distance, dtype=torch.bool) if bidirectional else distance >= 0
    return visible if window is None else visible & (distance.abs() < window)


def gather_pages(pages: torch.Tensor, table_row: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The entries of `pages` [P, page, Hkv, D] at the `places` [T] of a slot whose pages are `table_row` -> [T, Hkv, D]."""
    page_size = pages.shape[1]
    return pages[table_row[places // page_size].long(), places % page_size]


def commit_pages_reference(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    context_lengths: torch.Tensor,
    path: torch.Tensor,
    path_lengths: torch.Tensor,
) -> None:
    """Same arguments and effect as `commit_pages`."""
    page_size = key_pages.shape[2]
    for index, (slot, length) in enumerate(zip(slots.tolist(), path_lengths.tolist(), strict=True)):
        if length == 0:
            continue
        committed, table_row = int(context_lengths[slot]), page_table[slot].long()
        old = committed + path[index, :length].long()
        new = committed + torch.arange(length, device=path.device)
        for pages in (key_pages, value_pages):
            moved = pages[:, table_row[old // page_size], old % page_size]
            pages[:, table_row[new // page_size], new % page_size] = moved
