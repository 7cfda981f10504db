"""Tree attention over pages, for every sequence of a round at once: static shapes, nothing looked at by the host.

Letters: B sequences, S pool slots, R packed rows, N most rows of one sequence, H query heads, Hkv key/value heads
(H a multiple of Hkv), D head dim, L layers, P pages.
Token t of slot s lies in page page_table[s, t // page_size], at t % page_size. The rows in flight are staged behind
the committed tokens: local row i of a sequence at place context_length + i. A CUDA tensor goes to the Triton kernels,
any other to the twin.
"""

from __future__ import annotations

import torch

from ddtree.kernels.tree_attention.pooled_reference import (
    commit_pages_reference,
    tree_attention_pooled_reference,
)


def tree_attention_pooled(
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
    """Attend from every row to its sequence's committed tokens and to the staged rows it may see.

    Args:
        query: [R, H, D], rows starts[b] to starts[b + 1] - 1 are sequence b's; the rest is padding.
        key_pages, value_pages: [P, page_size, Hkv, D] in query's dtype; the rows' own entries are staged already. A page size
            of 1: every token lies where the table says, as in SGLang's pools.
        page_table: [S, max_pages] int32.
        slots: [B] int32; -1 for a sequence without rows.
        starts: [B + 1] int32; no sequence has more than `max_rows` rows, some may have none.
        context_lengths: [S] int32.
        ancestor_mask: [R, N] uint8, column j is the sequence's local row j; parents precede children, so nothing
            behind the diagonal is looked at. Rows that do not see their sequence's first row are padding inside the
            sequence: they come last, see nothing, are seen by none and come out as 0. None means consecutive tokens.
        window: a row sees only places nearer than this to its own; consecutive tokens only.
        bidirectional: every row sees all rows of its sequence (a DFlash block); consecutive tokens only.
        out: [R, H, D] to write to; padding rows are left as they are.
        workspace: float32 scratch of at least `attention_workspace_size` elements; allocated where None.

    Returns:
        [R, H, D] in query's dtype; `out` where given.
    """
    check_attention(query, key_pages, value_pages, ancestor_mask, window, bidirectional)
    if query.is_cuda:
        from ddtree.kernels.tree_attention.triton import tree_attention_pooled_triton as attend
    else:
        attend = tree_attention_pooled_reference
    return attend(
        query,
        key_pages,
        value_pages,
        page_table,
        slots,
        starts,
        context_lengths,
        ancestor_mask,
        scale,
        max_rows,
        window=window,
        bidirectional=bidirectional,
        out=out,
        workspace=workspace,
    )


def commit_pages(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    context_lengths: torch.Tensor,
    path: torch.Tensor,
    path_lengths: torch.Tensor,
) -> None:
    """Make each sequence's path permanent in all layers: staged row path[b, j] moves to place context_length + j.

    Args:
        key_pages, value_pages: [L, P, page_size, Hkv, D], changed in place.
        page_table: [S, max_pages] int32.
        slots: [B] int32, all different.
        context_lengths: [S] int32; not changed, the caller adds the path lengths.
        path: [B, P] int32 local rows, rising strictly; entries from the path's length on are ignored.
        path_lengths: [B] int32; 0 moves nothing.
    """
    if key_pages.is_cuda:
        from ddtree.kernels.tree_attention.commit_triton import commit_pages_triton as commit
    else:
        commit = commit_pages_reference
    commit(key_pages, value_pages, page_table, slots, context_lengths, path, path_lengths)


def check_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    ancestor_mask: torch.Tensor | None,
    window: int | None,
    bidirectional: bool,
) -> None:
    num_heads, head_dim = query.shape[1:]
    page_size, num_kv_heads = key_pages.shape[1:3]
    if key_pages.shape != value_pages.shape or key_pages.shape[3] != head_dim:
        raise ValueError(
            f"key_pages {list(key_pages.shape)} and value_pages {list(value_pages.shape)} must be alike "
            f"and have query's head dim {head_dim}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"query has {num_heads} heads, which must be a multiple of the pages' {num_kv_heads}")
    if page_size != 1 and (page_size & (page_size - 1) or page_size < 16):
        raise ValueError(f"page size must be 1 or a power of two of at least 16, got {page_size}")
    if not query.dtype == key_pages.dtype == value_pages.dtype:
        raise ValueError(f"pages of {key_pages.dtype} do not fit a query of {query.dtype}; cast one of them")
    if ancestor_mask is not None and (bidirectional or window is not None):
        raise ValueError("window and bidirectional are for consecutive rows; pass ancestor_mask=None with them")
    if ancestor_mask is not None and (ancestor_mask.dtype != torch.uint8 or ancestor_mask.stride(1) != 1):
        raise ValueError(
            f"ancestor_mask must be uint8 with its columns side by side, got {ancestor_mask.dtype} "
            f"with strides {ancestor_mask.stride()}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1, got {window}; None means no window")
