"""Norm, rotation and cache write in one launch. Letters as in the package's __init__; E rotary dim."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _qk_rotary_kernel(
    heads, positions, frequencies, sign, scale, keys, values, page_table, row_slots, row_indices, context_lengths,
    query_out, attention_factor, eps, stride_row, stride_head, stride_scale, stride_page, stride_token, stride_kv_head,
    stride_table, stride_query_row, stride_query_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NORM: tl.constexpr, PLAIN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one row. Each dimension also reads its partner, at half a rotary dim's distance."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots + row)
    if slot < 0:
        return
    dtype = query_out.dtype.element_ty
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    is_query, is_turned = head < NUM_HEADS, head < NUM_HEADS + NUM_KV_HEADS
    inside = dim < HEAD_DIM
    there = inside & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    turns = dim < ROTARY_DIM
    partner = tl.where(turns, tl.where(dim < ROTARY_DIM // 2, dim + ROTARY_DIM // 2, dim - ROTARY_DIM // 2), dim)
    source = heads + row * stride_row + head * stride_head
    raw = tl.load(source + dim, mask=there, other=0.0)
    value = raw.to(tl.float32)
    other = tl.load(source + partner, mask=there & turns & is_turned, other=0.0).to(tl.float32)
    if NORM:
        rate = tl.rsqrt(tl.sum(value * value, axis=1) / HEAD_DIM + eps)[:, None]
        weighed = there & is_turned
        factor = tl.load(scale + head * stride_scale + dim, mask=weighed, other=0.0).to(tl.float32)
        other_factor = tl.load(scale + head * stride_scale + partner, mask=weighed & turns, other=0.0).to(tl.float32)
        value, other = value * rate, other * rate
        if PLAIN:
            value, other = value.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
        # Rounded where the models round: fp32 in between would be closer to nothing that was trained.
        value = (value * factor).to(dtype).to(tl.float32)
        other = (other * other_factor).to(dtype).to(tl.float32)
    frequency = tl.load(frequencies + dim, mask=turns, other=0.0)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    sine = tl.sin(angle) * tl.load(sign + dim, mask=turns, other=0.0) * attention_factor
    cosine = (tl.cos(angle) * attention_factor).to(dtype).to(tl.float32)
    product = (value * cosine).to(dtype).to(tl.float32)
    turned = (product + other * sine.to(dtype).to(tl.float32)).to(dtype)
    turned = tl.where(turns, turned, value.to(dtype))
    target = query_out + row * stride_query_row + head * stride_query_head + dim
    tl.store(target, turned, mask=there & is_query)
    place = tl.load(context_lengths + slot) + tl.load(row_indices + row)
    page = tl.load(page_table + slot.to(tl.int64) * stride_table + place // PAGE_SIZE).to(tl.int64)
    entry = page * stride_page + (place % PAGE_SIZE) * stride_token + dim
    tl.store(keys + entry + (head - NUM_HEADS) * stride_kv_head, turned, mask=inside & is_turned & (head >= NUM_HEADS))
    value_head = head - NUM_HEADS - NUM_KV_HEADS
    tl.store(values + entry + value_head * stride_kv_head, raw, mask=there & (value_head >= 0))


def qk_rotary_pooled_triton(
    heads: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    sign: torch.Tensor,
    attention_factor: float,
    scale: torch.Tensor | None,
    kind: str | None,
    eps: float,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indices: torch.Tensor,
    context_lengths: torch.Tensor,
    query_out: torch.Tensor,
) -> torch.Tensor:
    """Same arguments and effect as `qk_rotary_pooled`."""
    num_rows, head_dim = heads.shape[0], heads.shape[2]
    page_size, num_kv_heads = key_pages.shape[1:3]
    num_heads = query_out.shape[1]
    for name, tensor in (("heads", heads), ("query_out", query_out), ("key_pages", key_pages)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, strides are {tensor.stride()}")
    if key_pages.stride() != value_pages.stride():
        raise ValueError("key_pages and value_pages must be laid out alike")
    block_d = triton.next_power_of_2(head_dim)
    block_h = max(1, 1024 // block_d)
    if num_rows == 0:
        return query_out
    grid = (num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, block_h))
    _qk_rotary_kernel[grid](
        heads, positions, frequencies, sign, heads if scale is None else scale, key_pages, value_pages, page_table,
        row_slots, row_indices, context_lengths, query_out, attention_factor, eps,
        heads.stride(0), heads.stride(1), 0 if scale is None else scale.stride(0),
        key_pages.stride(0), key_pages.stride(1), key_pages.stride(2), page_table.stride(0),
        query_out.stride(0), query_out.stride(1),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=frequencies.shape[0],
        PAGE_SIZE=page_size, NORM=kind is not None, PLAIN=kind == "plain",
        BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return query_out
