"""Tree attention over pages in Triton: split over the keys, then combined (flash decoding over an ancestor mask).

Letters: B sequences, R packed rows, H query heads, Hkv key/value heads, G = H / Hkv, D head dim, T keys of a tile.
The G query heads of one key head and the rows of one sequence are the *pairs* of a tile: pair = row * G + head within
the group, so a tile reads each key once for all of them. A program owns a tile of pairs, a key head and a split of the
sequence's keys; the number of splits is static, their share follows the context length on the device, so that one
captured graph serves every context. Softmax runs in fp32 and base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.tree_attention.plan import AttentionPlan, plan_attention


@triton.jit
def _reach(
    tile, num_rows, context_length, window, num_splits,
    GROUP: tl.constexpr, LEAST_SHARE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr, TREE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Of a tile of pairs: first key tile, end of the keys, up to where all rows see all, key tiles of a split."""
    first_row = tile * BLOCK_M // GROUP
    last_row = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_rows - 1)
    if BIDIRECTIONAL:
        end = context_length + num_rows
        shared_end = end
    else:
        end = context_length + last_row + 1
        shared_end = context_length if TREE else context_length + first_row + 1
    first_tile = context_length * 0
    if WINDOWED:
        first_tile = tl.maximum(context_length + first_row - window + 1, 0) // BLOCK_T
        shared_end = end * 0
    num_tiles = tl.cdiv(end, BLOCK_T) - first_tile
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), LEAST_SHARE)
    return first_tile, end, shared_end, share


@triton.jit
def _count_nodes(mask, start, num_rows, stride_mask, BLOCK_N: tl.constexpr):
    """How many of a sequence's rows see its root: the others are padding, and come last."""
    row = tl.arange(0, BLOCK_N)
    sees_root = tl.load(mask + (start + row) * stride_mask, mask=row < num_rows, other=0) != 0
    return tl.sum(sees_root.to(tl.int32), axis=0)


@triton.jit
def _clear(
    out, tile, start, num_rows, kv_head, stride_out,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write zeros for a tile of pairs."""
    pair, dim = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    place = ((start + row).to(tl.int64) * stride_out + head * HEAD_DIM)[:, None] + dim[None, :]
    there = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + place, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=there)


@triton.jit
def _visible(
    mask, rows, first_row, place, start, num_rows, context_length, window, stride_mask,
    DISTINCT: tl.constexpr, BLOCK_T: tl.constexpr, TREE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """[pairs, BLOCK_T] bool: which of the keys from `place` on each pair sees. DISTINCT rows from `first_row` on are those of all pairs."""
    token = tl.arange(0, BLOCK_T)[None, :]
    node, row = place - context_length + token, rows[:, None]
    if TREE:
        # A row's heads see alike: of its bits there is a word of 32 or two, made once and handed to each pair by gathering. A mask
        # that is loaded as a tile of pairs would impose the load's layout on the whole softmax, and every tile of scores would
        # be copied through shared memory to get there.
        own = first_row + tl.arange(0, DISTINCT)
        staged = (node >= 0) & (node <= own[:, None]) & (own < num_rows)[:, None]
        seen = tl.load(mask + (start + own)[:, None] * stride_mask + node, mask=staged, other=0) != 0
        bits = tl.where(seen & (token < 32), 1 << (token & 31), 0)
        word = tl.gather(tl.sum(bits, axis=1), rows - first_row, axis=0)[:, None]
        if BLOCK_T > 32:
            bits = tl.where(seen & (token >= 32), 1 << (token & 31), 0)
            high = tl.gather(tl.sum(bits, axis=1), rows - first_row, axis=0)[:, None]
            word = tl.where(token < 32, word, high)
        visible = (node < 0) | (((word >> (token & 31)) & 1) != 0)
    elif BIDIRECTIONAL:
        visible = (node < num_rows) & (row >= 0)
        if WINDOWED:
            visible = visible & (tl.abs(row - node) < window)
    else:
        visible = node <= row
        if WINDOWED:
            visible = visible & (row - node < window)
    return visible


@triton.jit(do_not_specialize=["num_packed", "num_splits"])  # one binary for batches of any size
def _attend_kernel(
    query, keys, values, page_table, slots, starts, context_lengths, mask, out, partial, log_totals,
    scale, window, num_packed, num_splits, num_kv_heads,
    stride_row, stride_head, stride_page, stride_token, stride_kv_head, stride_table, stride_mask, stride_out,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LEAST_SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    TREE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    DISTINCT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head, split = tl.program_id(1) % num_kv_heads, tl.program_id(1) // num_kv_heads
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    num_rows = tl.load(starts + sequence + 1) - start
    slot = tl.load(slots + sequence)
    if (tile * BLOCK_M >= num_rows * GROUP) | (slot < 0):
        return
    num_nodes = num_rows
    if TREE:
        num_nodes = _count_nodes(mask, start, num_rows, stride_mask, BLOCK_N)
        if tile * BLOCK_M >= num_nodes * GROUP:
            if not SPLIT:
                _clear(out, tile, start, num_rows, kv_head, stride_out, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
            return
    context_length = tl.load(context_lengths + slot)
    first_tile, end, shared_end, share = _reach(
        tile, num_nodes, context_length, window, num_splits,
        GROUP, LEAST_SHARE, BLOCK_M, BLOCK_T, TREE, BIDIRECTIONAL, WINDOWED,
    )  # fmt: skip
    low = first_tile + split * share
    high = tl.minimum(low + share, tl.cdiv(end, BLOCK_T))
    if low >= high:
        return  # the combining kernel knows how many splits there are
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    dim = tl.arange(0, BLOCK_D)
    inside = (dim < HEAD_DIM)[None, :]
    packed = (start + rows).to(tl.int64)
    live = rows < num_nodes
    stored = live[:, None] & inside
    rows_query = tl.load(
        query + (packed * stride_row + heads * stride_head)[:, None] + dim[None, :], mask=stored, other=0.0
    )
    keys += kv_head * stride_kv_head
    values += kv_head * stride_kv_head
    table_row = page_table + slot.to(tl.int64) * stride_table
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    token = tl.arange(0, BLOCK_T)
    if PAGE_SIZE > 1:
        next_page = tl.load(table_row + low * BLOCK_T // PAGE_SIZE)
    for key_tile in range(low, high):
        place = key_tile * BLOCK_T
        if PAGE_SIZE > 1:  # all of a tile lies in one page
            page = next_page.to(tl.int64)
            offset = page * stride_page + ((place % PAGE_SIZE + token) * stride_token)[:, None] + dim[None, :]
        else:  # a page is a token, and they lie anywhere
            page_each = tl.load(table_row + place + token, mask=place + token < end, other=0).to(tl.int64)
            offset = (page_each * stride_page)[:, None] + dim[None, :]
        # Behind the end a page may hold anything, and NaN times a probability of 0 is NaN.
        there = ((place + token) < end)[:, None]
        if BLOCK_D != HEAD_DIM:
            there = there & (dim < HEAD_DIM)[None, :]
        key = tl.load(keys + offset, mask=there, other=0.0)
        scores = tl.dot(rows_query, tl.trans(key), input_precision=PRECISION) * scale
        # Tiles that every row of the program sees whole need no mask.
        if place + BLOCK_T > shared_end:
            visible = _visible(
                mask, rows, tile * BLOCK_M // GROUP, place, start, num_nodes, context_length, window, stride_mask,
                DISTINCT, BLOCK_T, TREE, BIDIRECTIONAL, WINDOWED,
            )  # fmt: skip
            scores = tl.where(visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet has the peak -inf, from which nothing can be subtracted.
        ground = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - ground)
        weights = tl.exp2(scores - ground[:, None])
        value = tl.load(values + offset, mask=there, other=0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
        # Ahead of its use: loads whose addresses wait for another load are not overlapped with the products.
        if PAGE_SIZE > 1:
            following = tl.minimum(key_tile + 1, high - 1) * BLOCK_T
            next_page = tl.load(table_row + following // PAGE_SIZE)
    # A row may have seen nothing in this split: its peak is -inf, its total 0.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    if not SPLIT:
        place_out = (packed * stride_out + heads * HEAD_DIM)[:, None] + dim[None, :]
        acc = tl.where(live[:, None], acc, 0.0)  # padding inside the sequence
        tl.store(out + place_out, acc.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & inside)
    else:
        num_heads = num_kv_heads * GROUP
        entry = (split * num_packed + packed) * num_heads + heads
        tl.store(partial + entry[:, None] * HEAD_DIM + dim[None, :], acc, mask=stored)
        log_total = peak + tl.log2(total)
        tl.store(log_totals + entry, log_total, mask=live)


@triton.jit(do_not_specialize=["num_packed", "num_splits"])  # one binary for batches of any size
def _combine_kernel(
    partial, log_totals, out, slots, starts, context_lengths, mask, window, num_packed, num_splits, num_heads,
    stride_mask, stride_out,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LEAST_SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    TREE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One row and head: the splits' outputs, weighed by their shares of the softmax."""
    row, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    num_rows = tl.load(starts + sequence + 1) - start
    slot = tl.load(slots + sequence)
    if (row >= num_rows) | (slot < 0):
        return
    num_nodes = num_rows
    if TREE:
        num_nodes = _count_nodes(mask, start, num_rows, stride_mask, BLOCK_N)
        if row >= num_nodes:
            column = tl.arange(0, BLOCK_D)
            place_padding = out + (start + row).to(tl.int64) * stride_out + head * HEAD_DIM + column
            tl.store(place_padding, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=column < HEAD_DIM)
            return
    context_length = tl.load(context_lengths + slot)
    tile = (row * GROUP + head % GROUP) // BLOCK_M
    first_tile, end, shared_end, share = _reach(
        tile, num_nodes, context_length, window, num_splits,
        GROUP, LEAST_SHARE, BLOCK_M, BLOCK_T, TREE, BIDIRECTIONAL, WINDOWED,
    )  # fmt: skip
    num_used = tl.cdiv(tl.cdiv(end, BLOCK_T) - first_tile, share)
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    used = split < num_used
    packed = (start + row).to(tl.int64)
    entry = (split * num_packed + packed) * num_heads + head
    log_total = tl.load(log_totals + entry, mask=used, other=-float("inf"))
    weight = tl.exp2(log_total - tl.max(log_total, axis=0))
    there = used[:, None] & (dim < HEAD_DIM)[None, :]
    attended = tl.load(partial + entry[:, None] * HEAD_DIM + dim[None, :], mask=there, other=0.0)
    combined = tl.sum(attended * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    place = out + packed * stride_out + head * HEAD_DIM + dim
    tl.store(place, combined.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def rows_of_tile(block_m: int, group: int) -> int:
    """At least as many rows as `block_m` pairs of `group` heads each may belong to, a power of two."""
    apart = block_m // group if block_m % group == 0 else -(-block_m // group) + 1
    return min(block_m, triton.next_power_of_2(apart))


def tree_attention_pooled_triton(
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
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Same arguments and result as `tree_attention_pooled`; `plan` overrides the table (tests, tuning)."""
    num_packed, num_heads, head_dim = query.shape
    page_size, num_kv_heads = key_pages.shape[1:3]
    num_sequences, group = slots.shape[0], num_heads // num_kv_heads
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if plan is None:
        plan = plan_attention(query, num_kv_heads, page_size, num_sequences, max_rows)
    num_numbers = plan.workspace_size(num_packed, num_heads, head_dim)
    if workspace is None:
        workspace = query.new_empty(num_numbers, dtype=torch.float32)
    elif workspace.numel() < num_numbers:
        raise ValueError(f"workspace has {workspace.numel()} elements, {num_numbers} are needed; see attention_workspace_size")
    partial, log_totals = workspace, workspace[plan.num_splits * num_packed * num_heads * head_dim :]
    for name, tensor in (("query", query), ("key_pages", key_pages), ("value_pages", value_pages), ("out", out)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, strides are {tensor.stride()}")
    if key_pages.stride() != value_pages.stride() or out.stride(1) != head_dim:
        raise ValueError("key_pages and value_pages must be laid out alike, and out's heads must follow one another")
    block_d = max(16, triton.next_power_of_2(head_dim))
    common = {
        "GROUP": group, "HEAD_DIM": head_dim, "LEAST_SHARE": plan.least_share,
        "BLOCK_M": plan.block_m, "BLOCK_T": plan.block_t, "BLOCK_D": block_d,
        "BLOCK_N": 1 if ancestor_mask is None else triton.next_power_of_2(max_rows), "TREE": ancestor_mask is not None,
        "BIDIRECTIONAL": bidirectional, "WINDOWED": window is not None,
    }  # fmt: skip
    mask = query if ancestor_mask is None else ancestor_mask
    grid = (triton.cdiv(max_rows * group, plan.block_m), num_kv_heads * plan.num_splits, num_sequences)
    _attend_kernel[grid](
        query, key_pages, value_pages, page_table, slots, starts, context_lengths, mask, out, partial, log_totals,
        scale * 1.4426950408889634, window or 0, num_packed, plan.num_splits, num_kv_heads,
        query.stride(0), query.stride(1), key_pages.stride(0), key_pages.stride(1), key_pages.stride(2),
        page_table.stride(0), mask.stride(0), out.stride(0),
        **common, PAGE_SIZE=page_size, PRECISION="ieee" if query.dtype == torch.float32 else None, SPLIT=plan.num_splits > 1,
        DISTINCT=rows_of_tile(plan.block_m, group), num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if plan.num_splits > 1:
        _combine_kernel[(max_rows, num_heads, num_sequences)](
            partial, log_totals, out, slots, starts, context_lengths, mask, window or 0, num_packed, plan.num_splits, num_heads,
            mask.stride(0), out.stride(0),
            **common, BLOCK_S=triton.next_power_of_2(plan.num_splits), num_warps=4,
        )  # fmt: skip
    return out
