"""Moving accepted rows to the front of the pages, in all layers with one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _commit_kernel(
    keys, values, page_table, slots, context_lengths, path, path_lengths,
    stride_layer, stride_page, stride_token, stride_table, stride_path, row_size,
    PAGE_SIZE: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Columns of one sequence's rows in one layer. A row moves only towards the front, so blocks go in rising order."""
    layer, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(path_lengths + sequence)
    if length == 0:
        return
    slot = tl.load(slots + sequence).to(tl.int64)
    context_length = tl.load(context_lengths + slot)
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    table_row = page_table + slot * stride_table
    keys += layer * stride_layer
    values += layer * stride_layer
    for first in range(0, length, BLOCK_J):
        step = first + tl.arange(0, BLOCK_J)
        node = tl.load(path + sequence * stride_path + step, mask=step < length, other=0)
        moves = (step < length) & (node != step)
        old, new = context_length + node, context_length + step
        old_page = tl.load(table_row + old // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
        new_page = tl.load(table_row + new // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
        source = (old_page * stride_page + (old % PAGE_SIZE) * stride_token)[:, None] + column[None, :]
        target = (new_page * stride_page + (new % PAGE_SIZE) * stride_token)[:, None] + column[None, :]
        there = moves[:, None] & (column < row_size)[None, :]
        key = tl.load(keys + source, mask=there)
        value = tl.load(values + source, mask=there)
        # Another thread may be about to overwrite what this one reads.
        tl.debug_barrier()
        tl.store(keys + target, key, mask=there)
        tl.store(values + target, value, mask=there)


def commit_pages_triton(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    context_lengths: torch.Tensor,
    path: torch.Tensor,
    path_lengths: torch.Tensor,
) -> None:
    """Same arguments and effect as `commit_pages`."""
    num_layers, _, page_size, num_kv_heads, head_dim = key_pages.shape
    row_size = num_kv_heads * head_dim
    if key_pages.stride() != value_pages.stride() or key_pages.stride()[-2:] != (head_dim, 1):
        raise ValueError("key_pages and value_pages must be laid out alike, a token's heads side by side")
    block_c = min(128, triton.next_power_of_2(row_size))
    grid = (num_layers, slots.shape[0], triton.cdiv(row_size, block_c))
    _commit_kernel[grid](
        key_pages, value_pages, page_table, slots, context_lengths, path, path_lengths,
        key_pages.stride(0), key_pages.stride(1), key_pages.stride(2), page_table.stride(0), path.stride(0), row_size,
        PAGE_SIZE=page_size, BLOCK_J=16, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
