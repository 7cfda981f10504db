"""Batch-invariant tree attention in Triton: splits of the body, then the tail and the sum of all.

Letters and words as in `invariant` and `triton`. One plan by shape serves one row and many: a tile of 64 pairs, filled or
not, so that the instructions are the same. A body's splits are bounded at places of the sequence that go by the row's
position, so rows of one tile may differ in them: what lies outside of a row's own split weighs 0, which changes no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.tree_attention.invariant import NUM_SPLITS

LEAST_KEYS = 128  # of a split; twice as many, and again, where the splits would not reach


@triton.jit
def _split_of(position, REACH: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, DOUBLINGS: tl.constexpr):
    """How many tokens a row's body has, and each of its splits."""
    body = tl.maximum(position + 1 - REACH, 0)
    share = body * 0 + LEAST
    for _ in tl.static_range(DOUBLINGS):
        share = tl.where(share * SPLITS < body, share * 2, share)
    return body, share


@triton.jit(do_not_specialize=["num_packed"])  # one binary for any number of rows
def _body_kernel(
    query, keys, values, page_table, slots, starts, positions, row_slots, partial, log_totals,
    scale, num_packed, num_kv_heads,
    stride_row, stride_head, stride_page, stride_token, stride_kv_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, REACH: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, DOUBLINGS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of the bodies of a tile of pairs: its output and the log of its softmax's total."""
    tile = tl.program_id(0)
    kv_head, split = tl.program_id(1) % num_kv_heads, tl.program_id(1) // num_kv_heads
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    num_rows = tl.load(starts + sequence + 1) - start
    slot = tl.load(slots + sequence)
    if (tile * BLOCK_M >= num_rows * GROUP) | (slot < 0):
        return
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    live = rows < num_rows
    live = live & (tl.load(row_slots + start + rows, mask=live, other=-1) >= 0)
    position = tl.load(positions + start + rows, mask=live, other=-1)
    body, share = _split_of(position, REACH, SPLITS, LEAST, DOUBLINGS)
    low = split * share
    high = tl.minimum(low + share, body)
    used = live & (low < high)
    first = tl.min(tl.where(used, low, 2147483647), axis=0)
    last = tl.max(tl.where(used, high, 0), axis=0)
    if first >= last:
        return
    # Between these every row's split has all keys.
    whole_from = tl.max(tl.where(used, low, 0), axis=0)
    whole_to = tl.min(tl.where(used, high, 2147483647), axis=0)
    dim = tl.arange(0, BLOCK_D)
    inside = (dim < HEAD_DIM)[None, :]
    packed = (start + rows).to(tl.int64)
    rows_query = tl.load(
        query + (packed * stride_row + heads * stride_head)[:, None] + dim[None, :], mask=used[:, None] & inside, other=0.0
    )
    keys += kv_head * stride_kv_head
    values += kv_head * stride_kv_head
    table_row = page_table + slot.to(tl.int64) * stride_table
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    token = tl.arange(0, BLOCK_T)
    tile_low, tile_high = first // BLOCK_T, tl.cdiv(last, BLOCK_T)
    next_page = tl.load(table_row + tile_low * BLOCK_T // PAGE_SIZE)
    for key_tile in range(tile_low, tile_high):
        place = key_tile * BLOCK_T  # all of a tile lies in one page
        page = next_page.to(tl.int64)
        offset = page * stride_page + ((place % PAGE_SIZE + token) * stride_token)[:, None] + dim[None, :]
        there = ((place + token) < last)[:, None]
        if BLOCK_D != HEAD_DIM:
            there = there & inside
        key = tl.load(keys + offset, mask=there, other=0.0)
        scores = tl.dot(rows_query, tl.trans(key), input_precision=PRECISION) * scale
        if (place < whole_from) | (place + BLOCK_T > whole_to):
            at = (place + token)[None, :]
            scores = tl.where((at >= low[:, None]) & (at < high[:, None]), scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet has the peak -inf, from which nothing can be subtracted.
        ground = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - ground)
        weights = tl.exp2(scores - ground[:, None])
        value = tl.load(values + offset, mask=there, other=0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
        following = tl.minimum(key_tile + 1, tile_high - 1) * BLOCK_T
        next_page = tl.load(table_row + following // PAGE_SIZE)
    total = tl.where(total == 0.0, 1.0, total)  # rows that nothing here belongs to
    acc = acc / total[:, None]
    entry = (split * num_packed + packed) * (num_kv_heads * GROUP) + heads
    tl.store(partial + entry[:, None] * HEAD_DIM + dim[None, :], acc, mask=used[:, None] & inside)
    tl.store(log_totals + entry, peak + tl.log2(total), mask=used)


@triton.jit(do_not_specialize=["num_packed"])
def _tail_kernel(
    query, keys, values, page_table, context_lengths, positions, row_slots, lineage, partial, log_totals, out,
    scale, num_packed, num_kv_heads,
    stride_row, stride_head, stride_page, stride_token, stride_kv_head, stride_table, stride_out,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, REACH: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, DOUBLINGS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row and key head: the tail's tokens, gathered, then the body's splits, in their order."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    head = kv_head * GROUP + tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    own = (tl.arange(0, BLOCK_G) < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    place_out = out + row.to(tl.int64) * stride_out + (head * HEAD_DIM)[:, None] + dim[None, :]
    slot = tl.load(row_slots + row)
    if slot < 0:
        tl.store(place_out, tl.zeros([BLOCK_G, BLOCK_D], out.dtype.element_ty), mask=own)
        return
    position = tl.load(positions + row)
    body, share = _split_of(position, REACH, SPLITS, LEAST, DOUBLINGS)
    back = tl.arange(0, REACH)
    there = back >= REACH - 1 - position
    places = tl.load(lineage + row * REACH + back) + tl.load(context_lengths + slot)
    page = tl.load(page_table + slot.to(tl.int64) * stride_table + places // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    offset = (page * stride_page + (places % PAGE_SIZE) * stride_token)[:, None] + kv_head * stride_kv_head + dim[None, :]
    loaded = there[:, None] & (dim < HEAD_DIM)[None, :]
    rows_query = tl.load(query + row.to(tl.int64) * stride_row + (head * stride_head)[:, None] + dim[None, :], mask=own, other=0.0)
    key = tl.load(keys + offset, mask=loaded, other=0.0)
    scores = tl.dot(rows_query, tl.trans(key), input_precision=PRECISION) * scale
    scores = tl.where(there[None, :], scores, -float("inf"))
    peak = tl.max(scores, axis=1)
    weights = tl.exp2(scores - peak[:, None])
    total = tl.sum(weights, axis=1)
    value = tl.load(values + offset, mask=loaded, other=0.0)
    acc = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    for split in range(tl.cdiv(body, share)):
        entry = (split * num_packed + row).to(tl.int64) * (num_kv_heads * GROUP) + head
        log_total = tl.load(log_totals + entry, mask=tl.arange(0, BLOCK_G) < GROUP, other=0.0)
        attended = tl.load(partial + entry[:, None] * HEAD_DIM + dim[None, :], mask=own, other=0.0)
        new_peak = tl.maximum(peak, log_total)
        shrink, weight = tl.exp2(peak - new_peak), tl.exp2(log_total - new_peak)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + attended * weight[:, None]
        peak = new_peak
    tl.store(place_out, (acc / total[:, None]).to(out.dtype.element_ty), mask=own)


def tree_attention_invariant_triton(
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
    num_splits: int = NUM_SPLITS,
    least_keys: int = LEAST_KEYS,
) -> torch.Tensor:
    """Same arguments and result as `tree_attention_invariant`; splits other than the engine's are for tests."""
    num_packed, num_heads, head_dim = query.shape
    page_size, num_kv_heads = key_pages.shape[1:3]
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for name, tensor in (("query", query), ("key_pages", key_pages), ("value_pages", value_pages), ("out", out)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, strides are {tensor.stride()}")
    if key_pages.stride() != value_pages.stride() or out.stride(1) != head_dim or not lineage.is_contiguous():
        raise ValueError("key_pages and value_pages must be laid out alike, out's heads and the lineage's rows follow one another")
    if num_packed == 0:
        return out
    workspace = query.new_empty(num_splits * num_packed * num_heads * (head_dim + 1), dtype=torch.float32)
    partial, log_totals = workspace, workspace[num_splits * num_packed * num_heads * head_dim :]
    block_m, block_t, num_warps, num_stages = body_tiles(query.dtype, head_dim, page_size)
    most_places = page_table.shape[1] * page_size
    doublings = max(0, -(-most_places // (num_splits * least_keys)) - 1).bit_length()
    common = {
        "GROUP": group, "HEAD_DIM": head_dim, "PAGE_SIZE": page_size, "REACH": lineage.shape[1], "SPLITS": num_splits,
        "LEAST": least_keys, "DOUBLINGS": doublings, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "PRECISION": "ieee" if query.dtype == torch.float32 else None,
    }  # fmt: skip
    scale *= 1.4426950408889634
    strides = (query.stride(0), query.stride(1), *key_pages.stride()[:3], page_table.stride(0))
    _body_kernel[(triton.cdiv(max_rows * group, block_m), num_kv_heads * num_splits, slots.shape[0])](
        query, key_pages, value_pages, page_table, slots, starts, positions, row_slots, partial, log_totals,
        scale, num_packed, num_kv_heads, *strides,
        **common, BLOCK_M=block_m, BLOCK_T=block_t, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    _tail_kernel[(num_packed, num_kv_heads)](
        query, key_pages, value_pages, page_table, context_lengths, positions, row_slots, lineage, partial, log_totals, out,
        scale, num_packed, num_kv_heads, *strides, out.stride(0),
        **common, BLOCK_G=max(16, triton.next_power_of_2(group)), num_warps=4,
    )  # fmt: skip
    return out


def body_tiles(dtype: torch.dtype, head_dim: int, page_size: int) -> tuple[int, int, int, int]:
    """Pairs and keys of a tile, warps and stages, by shape: below 99 KB of shared memory a program."""
    if head_dim > 256:
        raise ValueError(f"head dim {head_dim} has no attention kernel; the largest is 256")
    if dtype == torch.float32:
        return 32, min(32, page_size), 8, 1
    keys, stages = (64, 3) if head_dim <= 64 else (64, 2) if head_dim <= 128 else (32, 2)
    return 64, min(keys, page_size), 4, stages
