"""The gates of a Gated-DeltaNet layer: a launch of their own, or a few programs of the convolution's."""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree.kernels.causal_conv.gates import Gates

HEAD_TILE = tl.constexpr(64)


def run_gates(gates: Gates) -> None:
    """Fill `log_decay` and `beta`."""
    rows = 4
    num_rows, heads = gates.a.shape
    grid = (triton.cdiv(num_rows, rows), gate_tiles(gates))
    _gates_kernel[grid](*gate_arguments(gates), num_rows, HEADS=heads, ROWS=rows, num_warps=2)


def gate_tiles(gates: Gates | None) -> int:
    """How many tiles of heads there are; none without gates."""
    return 0 if gates is None else triton.cdiv(gates.a.shape[1], HEAD_TILE.value)


def gate_arguments(gates: Gates | None) -> tuple:
    """What `gate_rows` takes before the rows."""
    return (*gates, gates.a.stride(0), gates.b.stride(0)) if gates is not None else (None,) * 6 + (0, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _gates_kernel(
    a, b, decay_rate, dt_bias, log_decay, beta, a_stride, b_stride, num_rows, HEADS: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    gate_rows(
        a, b, decay_rate, dt_bias, log_decay, beta, a_stride, b_stride, rows, inside, tl.program_id(1), HEADS
    )


@triton.jit
def gate_rows(
    a, b, decay_rate, dt_bias, log_decay, beta, a_stride, b_stride, rows, inside, tile, HEADS: tl.constexpr
):
    """log_decay and beta of `rows` [n] where `inside`, for a tile of heads."""
    head = tile * HEAD_TILE + tl.arange(0, HEAD_TILE)
    along = head < HEADS
    mask = inside[:, None] & along[None, :]
    rows = rows.to(tl.int64)[:, None]
    # fp64: the fast logarithm of fp32 loses what is small, and there are few numbers.
    shift = tl.load(dt_bias + head, mask=along, other=0.0)[None, :]
    steps = (tl.load(a + rows * a_stride + head[None, :], mask=mask, other=0.0).to(tl.float32) + shift).to(tl.float64)
    growth = tl.exp(tl.minimum(steps, 20.0))
    softplus = tl.where(steps < -15.0, growth * (1.0 - 0.5 * growth), tl.log(1.0 + growth))
    softplus = tl.where(steps > 20.0, steps, softplus)
    rate = tl.load(decay_rate + head, mask=along, other=0.0)[None, :]
    places = rows * HEADS + head[None, :]
    tl.store(log_decay + places, rate * softplus.to(tl.float32), mask=mask)
    strength = tl.load(b + rows * b_stride + head[None, :], mask=mask, other=0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-strength.to(tl.float64)))
    tl.store(beta + places, sigmoid.to(tl.float32).to(strength.dtype).to(tl.float32), mask=mask)
