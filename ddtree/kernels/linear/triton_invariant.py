"""Linear layers whose rows have the same bits however many rows there are, and whatever the others hold.

Letters as in the package's __init__. Every element is summed up along K by the same instructions in the same order: 16
columns at a time in one warpgroup's (or, before sm_90, one warp's) product, which is as large for one row as for many;
parts of K, whose number goes by the weight's shape, are added in their order. Tiles of rows are the fastest axis of the
grid, so that a weight's tile is read from memory once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.linear.plan import InvariantPlan
from ddtree.kernels.linear.triton import SUM_TILE, _beside, _finish, _load, _sum_parts_kernel


@triton.jit(do_not_specialize=["num_rows"])
def _invariant_kernel(
    x, weight, bias, residual, out, partials, num_rows, width, stride_x, stride_weight, stride_residual, stride_out,
    K: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows times BLOCK_N columns, over one part's SPAN of K."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    part = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns beyond the last read the last one's weights and write nothing.
    within = tl.minimum(column, width - 1)
    source = weight + within.to(tl.int64)[None, :] * stride_weight
    up_source = weight + (within + width).to(tl.int64)[None, :] * stride_weight
    rows = x + row.to(tl.int64)[:, None] * stride_x
    alive = (row < num_rows)[:, None]
    wide = column[None, :]
    there = alive & (wide < width)
    place = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(part * SPAN, tl.minimum((part + 1) * SPAN, K), BLOCK_K):
        k = start + place
        inside = k < K
        weights = _load(source + k[:, None], inside[:, None], MASKED)
        if MASKED:
            value = tl.load(rows + k[None, :], mask=alive & inside[None, :], other=0.0)
        else:
            value = tl.load(rows + k[None, :], mask=alive, other=0.0)
        total = tl.dot(value, weights, total, input_precision="ieee")
        if SWIGLU:
            up_weights = _load(up_source + k[:, None], inside[:, None], MASKED)
            ups = tl.dot(value, up_weights, ups, input_precision="ieee")
    if SPAN < K:
        number = width * (2 if SWIGLU else 1)
        entry = (part * num_rows + row[:, None]).to(tl.int64) * number + wide
        tl.store(partials + entry, total, mask=there)
        if SWIGLU:
            tl.store(partials + entry + width, ups, mask=there)
    else:
        place_residual = residual + row.to(tl.int64)[:, None] * stride_residual + wide
        bias_here, up_bias, added = _beside(bias, place_residual, wide, width, there, BIAS, SWIGLU, RESIDUAL)
        place_out = out + row.to(tl.int64)[:, None] * stride_out + wide
        _finish(total, ups, 1.0, bias_here, up_bias, added, place_out, there, False, BIAS, SWIGLU, RESIDUAL)


def invariant_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    swiglu: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    plan: InvariantPlan,
) -> torch.Tensor:
    """As `fused_linear` without a norm, in `plan`'s tiles, for any number of rows."""
    num_rows, width = x.shape
    num_columns = weight.shape[0] // 2 if swiglu else weight.shape[0]
    if out is None:
        out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    block_m, num_warps, num_stages = next(rest for most, *rest in plan.rows if most is None or num_rows <= most)
    bias_in, residual_in = x if bias is None else bias, x if residual is None else residual
    steps = {"BIAS": bias is not None, "SWIGLU": swiglu, "RESIDUAL": residual is not None}
    span = triton.cdiv(triton.cdiv(width, plan.num_parts), plan.block_k) * plan.block_k
    num_parts = triton.cdiv(width, span)
    partials = x
    if num_parts > 1:
        partials = torch.empty(num_parts, num_rows, weight.shape[0], dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, block_m), triton.cdiv(num_columns, plan.block_n), num_parts)
    _invariant_kernel[grid](
        x, weight, bias_in, residual_in, out, partials, num_rows, num_columns,
        x.stride(0), weight.stride(0), residual_in.stride(0), out.stride(0), K=width, **steps,
        SPAN=span, BLOCK_M=block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if num_parts > 1:
        _sum_parts_kernel[(num_rows, triton.cdiv(num_columns, SUM_TILE))](
            partials, partials, bias_in, residual_in, out, num_rows, num_columns,
            residual_in.stride(0), out.stride(0), 0.0, K=width, NORM=False, **steps,
            PARTS=num_parts, BLOCK_N=SUM_TILE, num_warps=4,
        )  # fmt: skip
    return out
