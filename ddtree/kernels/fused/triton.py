"""The fused steps in Triton. Letters as in the package's __init__."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    hidden, weight, out, num_columns, stride_row, eps, PLAIN: tl.constexpr, BLOCK_C: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_C)
    there = column < num_columns
    value = tl.load(hidden + row * stride_row + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / num_columns + eps)
    if PLAIN:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * num_columns + column, (normed * scale).to(out.dtype.element_ty), mask=there)


@triton.jit
def _swiglu_kernel(gate_up, out, width, stride_row, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    there = column < width
    gate = tl.load(gate_up + row * stride_row + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_row + width + column, mask=there, other=0.0).to(tl.float32)
    gated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (gated * up).to(out.dtype.element_ty), mask=there)


@triton.jit
def _gate_heads_kernel(
    attended, gate, out, width, stride_row, stride_gate_row, stride_gate_head, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    place = (column // HEAD_DIM) * stride_gate_head + column % HEAD_DIM
    opened = tl.sigmoid(tl.load(gate + row * stride_gate_row + place, mask=there, other=0.0).to(tl.float32))
    value = tl.load(attended + row * stride_row + column, mask=there, other=0.0).to(tl.float32)
    opened = opened.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (value * opened).to(out.dtype.element_ty), mask=there)


@triton.jit
def _norm_and_gate_kernel(
    values, gate, weight, out, num_heads, stride_row, stride_head, stride_gate_row, stride_gate_head, eps,
    DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    there = (head < num_heads) & (dim < DIM)
    value = tl.load(values + row * stride_row + head * stride_head + dim, mask=there, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * stride_gate_row + head * stride_gate_head + dim, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=1) / DIM + eps)[:, None]
    normed = normed.to(out.dtype.element_ty).to(tl.float32)
    gated = normed * scale * (opened * tl.sigmoid(opened))
    tl.store(out + (row * num_heads + head) * DIM + dim, gated.to(out.dtype.element_ty), mask=there)


@triton.jit
def _argmax_part_kernel(logits, values, ids, num_columns, stride_row, BLOCK_V: tl.constexpr):
    """The largest of one row's BLOCK_V logits, and where."""
    part, row = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK_V + tl.arange(0, BLOCK_V)
    there = column < num_columns
    value = tl.load(logits + row.to(tl.int64) * stride_row + column, mask=there, other=-float("inf")).to(tl.float32)
    value = tl.where(value == value, value, -float("inf"))
    best, place = tl.max(value, axis=0, return_indices=True)
    entry = row * tl.num_programs(0) + part
    tl.store(values + entry, best)
    tl.store(ids + entry, part * BLOCK_V + place)


@triton.jit
def _argmax_whole_kernel(values, ids, out, num_parts, BLOCK_P: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK_P)
    value = tl.load(values + row * num_parts + part, mask=part < num_parts, other=-float("inf"))
    _, best = tl.max(value, axis=0, return_indices=True)
    tl.store(out + row, tl.load(ids + row * num_parts + best).to(tl.int64))


def rms_norm_triton(hidden: torch.Tensor, weight: torch.Tensor, eps: float, kind: str) -> torch.Tensor:
    """Same arguments and result as `rms_norm`."""
    hidden, (num_rows, num_columns) = _rows(hidden, "hidden"), hidden.shape
    out = torch.empty(num_rows, num_columns, dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(num_columns)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            hidden, weight, out, num_columns, hidden.stride(0), eps,
            PLAIN=kind == "plain", BLOCK_C=block, num_warps=_warps(block),
        )  # fmt: skip
    return out


def swiglu_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `swiglu`."""
    gate_up, num_rows, width = _rows(gate_up, "gate_up"), gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _swiglu_kernel[(num_rows, triton.cdiv(width, 1024))](
            gate_up, out, width, gate_up.stride(0), BLOCK_F=1024, num_warps=4
        )
    return out


def gate_heads_triton(attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `gate_heads`."""
    num_rows, num_heads, head_dim = attended.shape
    attended = attended.contiguous()
    out = torch.empty_like(attended)
    width = num_heads * head_dim
    if num_rows:
        _gate_heads_kernel[(num_rows, triton.cdiv(width, 1024))](
            attended, _rows(gate, "gate"), out, width, attended.stride(0), gate.stride(0), gate.stride(1),
            HEAD_DIM=head_dim, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


def norm_and_gate_triton(
    values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Same arguments and result as `norm_and_gate`."""
    num_rows, num_heads, dim = values.shape
    values, gate = _rows(values, "values"), _rows(gate, "gate")
    out = torch.empty(num_rows, num_heads, dim, dtype=values.dtype, device=values.device)
    block_d = triton.next_power_of_2(dim)
    block_h = max(1, 1024 // block_d)
    if num_rows:
        _norm_and_gate_kernel[(num_rows, triton.cdiv(num_heads, block_h))](
            values, gate, weight, out, num_heads,
            values.stride(0), values.stride(1), gate.stride(0), gate.stride(1), eps,
            DIM=dim, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return out


def argmax_triton(logits: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `argmax`."""
    logits, (num_rows, num_columns) = _rows(logits, "logits"), logits.shape
    block = min(8192, triton.next_power_of_2(num_columns))
    num_parts = triton.cdiv(num_columns, block)
    values = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _argmax_part_kernel[(num_parts, num_rows)](
            logits, values, ids, num_columns, logits.stride(0), BLOCK_V=block, num_warps=_warps(block)
        )
        block_p = triton.next_power_of_2(num_parts)
        _argmax_whole_kernel[(num_rows,)](values, ids, out, num_parts, BLOCK_P=block_p, num_warps=1)
    return out


def _rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` itself: rows may be strided, what lies in a row's last dimension may not."""
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, strides are {tensor.stride()}")
    return tensor


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
