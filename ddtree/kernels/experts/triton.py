"""Experts' linears in Triton: pairs sorted by expert, each expert's in tiles of their own.

Letters as in the package's __init__; T tiles. The instructions and the order of sums are those of `linear.triton_invariant`: a
tile of 64 rows, filled or not. Which expert a tile is of, and where its pairs begin and end, is found on the device; there are
at most as many tiles as pairs, and as many as full tiles and experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.linear.triton import _finish, _load

SUM_COLUMNS = 512


@triton.jit
def _expert_kernel(
    x, weight, out, order, tile_experts, tile_starts, tile_stops, width, pairs_each, stride_x,
    K: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of an expert's pairs times BLOCK_N of its columns."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    tile = tl.program_id(0)
    place, stop = tl.load(tile_starts + tile) + tl.arange(0, BLOCK_M), tl.load(tile_stops + tile)
    if tl.load(tile_starts + tile) >= stop:
        return
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    alive = place < stop
    pair = tl.load(order + place, mask=alive, other=0)
    # Columns beyond the last read the last one's weights and write nothing.
    within = tl.minimum(column, width - 1).to(tl.int64)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    own = weight + expert * (K * width * (2 if SWIGLU else 1))
    source, up_source = own + within[None, :] * K, own + (within + width)[None, :] * K
    rows = x + (pair // pairs_each)[:, None] * stride_x
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < K
        weights = _load(source + k[:, None], inside[:, None], MASKED)
        value = tl.load(rows + k[None, :], mask=alive[:, None] & inside[None, :], other=0.0)
        total = tl.dot(value, weights, total, input_precision="ieee")
        if SWIGLU:
            up_weights = _load(up_source + k[:, None], inside[:, None], MASKED)
            ups = tl.dot(value, up_weights, ups, input_precision="ieee")
    there = alive[:, None] & (column < width)[None, :]
    place_out = out + pair[:, None] * width + column[None, :]
    _finish(total, ups, 1.0, 0.0, 0.0, 0.0, place_out, there, False, False, SWIGLU, False)


@triton.jit
def _add_up_kernel(outputs, weights, out, num_columns, EACH: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < num_columns
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(EACH):
        output = tl.load(outputs + (row * EACH + place) * num_columns + column, mask=there, other=0.0).to(tl.float32)
        total += output * tl.load(weights + row * EACH + place).to(tl.float32)
    tl.store(out + row * num_columns + column, total.to(out.dtype.element_ty), mask=there)


def tiles_of(experts: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, ...]:
    """Pairs by expert [P], and of each tile its expert, its first pair and where its pairs end, [T] each."""
    pairs = experts.flatten()
    order = pairs.argsort(stable=True)
    counts = torch.nn.functional.one_hot(pairs, num_experts).sum(dim=0)
    ends, tile_ends = counts.cumsum(0), ((counts + (block_m - 1)) // block_m).cumsum(0)
    most = min(len(pairs), len(pairs) // block_m + num_experts)
    tile = torch.arange(most, device=pairs.device)
    expert = torch.searchsorted(tile_ends, tile, right=True).clamp_(max=num_experts - 1)
    first = torch.where(expert > 0, tile_ends[expert - 1], 0)
    starts = (ends - counts)[expert] + (tile - first) * block_m
    # Tiles behind the last one begin where they end.
    return order, expert, starts, torch.minimum(ends[expert], starts + block_m)


def expert_linear_triton(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, swiglu: bool) -> torch.Tensor:
    """Same arguments and result as `expert_linear`."""
    num_experts, num_columns, width = weight.shape
    num_columns //= 2 if swiglu else 1
    num_pairs = experts.numel()
    out = torch.empty(num_pairs, num_columns, dtype=x.dtype, device=x.device)
    if not num_pairs:
        return out
    if x.dtype == torch.float32:
        block_m, block_n, block_k, num_stages = 32, 32, 32, 2
    else:
        block_m, block_n, block_k, num_stages = 64, 64 if swiglu else 128, 64, 4
    order, *tiles = tiles_of(experts, num_experts, block_m)
    _expert_kernel[(len(tiles[0]), triton.cdiv(num_columns, block_n))](
        x, weight, out, order, *tiles, num_columns, num_pairs // len(x), x.stride(0),
        K=width, SWIGLU=swiglu, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=num_stages,
    )  # fmt: skip
    return out


def add_up_triton(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `add_up`."""
    num_rows, each = weights.shape
    out = torch.empty(num_rows, outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    if num_rows:
        _add_up_kernel[(num_rows, triton.cdiv(outputs.shape[1], SUM_COLUMNS))](
            outputs, weights, out, outputs.shape[1], EACH=each, BLOCK_N=SUM_COLUMNS, num_warps=4
        )
    return out
