"""Weight-streaming linear layers in Triton: one row by fused multiply-adds, up to 128 rows by tensor cores.

Letters as in the package's __init__. The weight is read once, by programs that share nothing; the input stays in L2.
The norm's 1/rms multiplies a whole row, so it is found while the weight streams by and applied to the sums; what is
multiplied is x * norm weight, rounded once as the models round it (a norm before the product would take every program
through the whole input first). Both kernels round the same way, so a plain step and a tree see the same operands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.linear.plan import Plan, bucket_of

SUM_TILE = 512  # columns of a program that adds parts up


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr):
    """Without a mask where there need not be one: a mask costs instructions per element."""
    if MASKED:
        return tl.load(pointer, mask=mask, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def _beside(
    bias, residual, column, width, there, BIAS: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr
):
    """What is added to the sums. Loaded before them, or small layers would wait for memory twice."""
    bias_here, up_bias, added = 0.0, 0.0, 0.0
    if BIAS:
        bias_here = tl.load(bias + column, mask=column < width, other=0.0)
        if SWIGLU:
            up_bias = tl.load(bias + width + column, mask=column < width, other=0.0)
    if RESIDUAL:
        added = tl.load(residual, mask=there, other=0.0)
    return bias_here, up_bias, added


@triton.jit
def _finish(
    total, ups, rate, bias_here, up_bias, added, out, there,
    NORM: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Everything after the sums; `out` points at the elements."""
    dtype = out.dtype.element_ty
    if NORM:
        total *= rate
        ups *= rate
    if BIAS:
        total += bias_here.to(tl.float32)
    if SWIGLU:
        if BIAS:
            ups += up_bias.to(tl.float32)
        gate, up = total.to(dtype).to(tl.float32), ups.to(dtype).to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        total = (gate * up).to(dtype).to(tl.float32)
    if RESIDUAL:
        total += added.to(tl.float32)
    tl.store(out, total.to(dtype), mask=there)


@triton.jit
def _row_kernel(
    x, weight, bias, norm_weight, residual, out, width, stride_weight, eps,
    K: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one row. Every thread keeps its own sums; they meet once, after the last BLOCK_K of K."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns beyond the last read the last one's weights and write nothing.
    within = tl.minimum(column, width - 1)
    source = weight + within.to(tl.int64)[:, None] * stride_weight
    up_source = weight + (within + width).to(tl.int64)[:, None] * stride_weight
    there = column < width
    bias_here, up_bias, added = _beside(bias, residual + column, column, width, there, BIAS, SWIGLU, RESIDUAL)
    place = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + place
        inside = k < K
        weights = _load(source + k[None, :], inside[None, :], MASKED).to(tl.float32)
        if SWIGLU:
            up_weights = _load(up_source + k[None, :], inside[None, :], MASKED).to(tl.float32)
        raw = _load(x + k, inside, MASKED)
        value = raw.to(tl.float32)
        if NORM:
            squares += value * value
            value *= _load(norm_weight + k, inside, MASKED).to(tl.float32)
            value = value.to(raw.dtype).to(tl.float32)
        total += weights * value[None, :]
        if SWIGLU:
            ups += up_weights * value[None, :]
    rate = 1.0
    if NORM:
        rate = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    _finish(
        tl.sum(total, axis=1), tl.sum(ups, axis=1), rate, bias_here, up_bias, added, out + column, there,
        NORM, BIAS, SWIGLU, RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # one binary for all R of a bucket
def _tile_kernel(
    x, weight, bias, norm_weight, residual, out, partials, partial_squares, num_rows, width,
    stride_x, stride_weight, stride_residual, stride_out, eps,
    K: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All rows times BLOCK_N columns, over the whole of K or, where SPAN is less, over one part's SPAN of it."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = tl.minimum(column, width - 1)
    source = weight + within.to(tl.int64)[None, :] * stride_weight
    up_source = weight + (within + width).to(tl.int64)[None, :] * stride_weight
    rows = x + row.to(tl.int64)[:, None] * stride_x
    alive = (row < num_rows)[:, None]
    wide = column[None, :]
    there = alive & (wide < width)
    if SPAN >= K:
        place_residual = residual + row.to(tl.int64)[:, None] * stride_residual + wide
        bias_here, up_bias, added = _beside(bias, place_residual, wide, width, there, BIAS, SWIGLU, RESIDUAL)
    place = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Few rows lie in every warp, so that squaring them would be repeated; the tensor cores do it on the side, as the
    # diagonal of x times its transpose.
    BY_DOT: tl.constexpr = BLOCK_M <= 32 and x.dtype.element_ty != tl.float32
    squares = tl.zeros([BLOCK_M, BLOCK_M if BY_DOT else BLOCK_K], tl.float32)
    if SPAN < K:
        first, last = part * SPAN, tl.minimum((part + 1) * SPAN, K)
    else:
        first, last = 0, K
    # Programs run side by side and all want the same input: each begins at another place of it, or they would queue for
    # the few slices of the L2 that hold one place.
    num_blocks = (last - first + BLOCK_K - 1) // BLOCK_K
    turn = tl.program_id(0) * num_blocks // tl.num_programs(0)
    for block in range(num_blocks):
        turned = block + turn
        k = first + tl.where(turned < num_blocks, turned, turned - num_blocks) * BLOCK_K + place
        inside = k < K
        weights = _load(source + k[:, None], inside[:, None], MASKED)
        if SWIGLU:
            up_weights = _load(up_source + k[:, None], inside[:, None], MASKED)
        if MASKED:
            value = tl.load(rows + k[None, :], mask=alive & inside[None, :], other=0.0)
        else:
            value = tl.load(rows + k[None, :], mask=alive, other=0.0)
        if NORM:
            raw = value.to(tl.float32)
            if BY_DOT:
                squares = tl.dot(value, tl.trans(value), squares)
            else:
                squares += raw * raw
            scale = _load(norm_weight + k, inside, MASKED).to(tl.float32)
            value = (raw * scale[None, :]).to(value.dtype)
        total = tl.dot(value, weights, total, input_precision="ieee")
        if SWIGLU:
            ups = tl.dot(value, up_weights, ups, input_precision="ieee")
    if BY_DOT:
        squares = tl.where(row[:, None] == row[None, :], squares, 0.0)
    sums = tl.sum(squares, axis=1)
    if SPAN < K:
        number = width * (2 if SWIGLU else 1)
        entry = (part * num_rows + row[:, None]).to(tl.int64) * number + wide
        tl.store(partials + entry, total, mask=there)
        if SWIGLU:
            tl.store(partials + entry + width, ups, mask=there)
        if NORM:
            noted = (row < num_rows) & (tl.program_id(0) == 0)
            tl.store(partial_squares + part * num_rows + row, sums, mask=noted)
    else:
        place_out = out + row.to(tl.int64)[:, None] * stride_out + wide
        rate = 1.0
        if NORM:
            rate = tl.rsqrt(sums / K + eps)[:, None]
        _finish(total, ups, rate, bias_here, up_bias, added, place_out, there, NORM, BIAS, SWIGLU, RESIDUAL)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_parts_kernel(
    partials, partial_squares, bias, residual, out, num_rows, width, stride_residual, stride_out, eps,
    K: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row's BLOCK_N columns: the parts' sums in their order, so that the bits are always the same."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < width
    number = width * (2 if SWIGLU else 1)
    place_residual = residual + row.to(tl.int64) * stride_residual + column
    bias_here, up_bias, added = _beside(bias, place_residual, column, width, there, BIAS, SWIGLU, RESIDUAL)
    total = tl.zeros([BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_N], tl.float32)
    sums = 0.0
    for part in tl.static_range(PARTS):
        entry = (part * num_rows + row).to(tl.int64) * number + column
        total += tl.load(partials + entry, mask=there, other=0.0)
        if SWIGLU:
            ups += tl.load(partials + entry + width, mask=there, other=0.0)
        if NORM:
            sums += tl.load(partial_squares + part * num_rows + row)
    rate = 1.0
    if NORM:
        rate = tl.rsqrt(sums / K + eps)
    place_out = out + row.to(tl.int64) * stride_out + column
    _finish(total, ups, rate, bias_here, up_bias, added, place_out, there, NORM, BIAS, SWIGLU, RESIDUAL)


def fused_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float, str] | None,
    swiglu: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    plan: Plan,
) -> torch.Tensor:
    """Same arguments and result as `fused_linear`, in `plan`'s tiles. R is at most the largest bucket."""
    num_rows, width = x.shape
    num_columns = weight.shape[0] // 2 if swiglu else weight.shape[0]
    if out is None:
        out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    bias_in, residual_in = x if bias is None else bias, x if residual is None else residual
    norm_weight, eps = (x, 0.0) if norm is None else norm[:2]
    steps = {"NORM": norm is not None, "BIAS": bias is not None, "SWIGLU": swiglu, "RESIDUAL": residual is not None}
    num_tiles = triton.cdiv(num_columns, plan.block_n)
    if num_rows == 1:
        _row_kernel[(num_tiles,)](
            x, weight, bias_in, norm_weight, residual_in, out, num_columns, weight.stride(0), eps, K=width, **steps,
            BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, STAGES=plan.num_stages, num_warps=plan.num_warps,
        )  # fmt: skip
        return out
    span = triton.cdiv(triton.cdiv(width, plan.num_parts), plan.block_k) * plan.block_k
    num_parts = triton.cdiv(width, span)
    partials = partial_squares = x
    if num_parts > 1:
        partials = torch.empty(num_parts, num_rows, weight.shape[0], dtype=torch.float32, device=x.device)
        partial_squares = torch.empty(num_parts, num_rows, dtype=torch.float32, device=x.device)
    _tile_kernel[(num_tiles, num_parts)](
        x, weight, bias_in, norm_weight, residual_in, out, partials, partial_squares, num_rows, num_columns,
        x.stride(0), weight.stride(0), residual_in.stride(0), out.stride(0), eps, K=width, **steps,
        SPAN=span, BLOCK_M=bucket_of(num_rows), BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if num_parts > 1:
        _sum_parts_kernel[(num_rows, triton.cdiv(num_columns, SUM_TILE))](
            partials, partial_squares, bias_in, residual_in, out, num_rows, num_columns,
            residual_in.stride(0), out.stride(0), eps, K=width, **steps,
            PARTS=num_parts, BLOCK_N=SUM_TILE, num_warps=4,
        )  # fmt: skip
    return out
