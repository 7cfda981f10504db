"""The short convolution of packed rows: of trees, where a window goes up a row's ancestors, and of prompts.

A program owns a few rows and a tile of channels. Beyond the channels' tiles lie programs that compute the gates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree.kernels.causal_conv.triton_gates import gate_arguments, gate_rows, gate_tiles

TREE_ROWS, TREE_CHANNELS = 2, 512
PREFILL_ROWS, PREFILL_CHANNELS = 16, 256


def tree(x, weight, bias, states, slots, starts, row_slots, row_indices, parents, out, gates) -> None:
    """Arguments as in `pooled.causal_conv_tree_pooled`."""
    num_rows, (channels, width) = x.shape[0], weight.shape
    grid = (triton.cdiv(num_rows, TREE_ROWS), triton.cdiv(channels, TREE_CHANNELS) + gate_tiles(gates))
    _tree_kernel[grid](
        x, weight, bias, states, row_slots, row_indices, parents, out, *gate_arguments(gates),
        num_rows,
        x.stride(0), weight.stride(0), out.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        HEADS=1 if gates is None else gates.a.shape[1],
        ROWS=TREE_ROWS,
        CHANNEL_TILE=TREE_CHANNELS,
        num_warps=4,
    )  # fmt: skip


def prefill(x, weight, bias, states, slots, starts, max_rows, out, gates) -> None:
    """Arguments as in `pooled.causal_conv_prefill_pooled`."""
    channels, width = weight.shape
    # The first rows' programs read the state before they replace it: all rows that need it have to be theirs.
    rows = max(PREFILL_ROWS, triton.next_power_of_2(width - 1))
    grid = (triton.cdiv(max_rows, rows), triton.cdiv(channels, PREFILL_CHANNELS) + gate_tiles(gates), slots.shape[0])
    _prefill_kernel[grid](
        x, weight, bias, states, slots, starts, out, *gate_arguments(gates),
        x.stride(0), weight.stride(0), out.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        HEADS=1 if gates is None else gates.a.shape[1],
        ROWS=rows,
        CHANNEL_TILE=PREFILL_CHANNELS,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _tree_kernel(
    x, weight, bias, states, row_slots, row_indices, parents, out,
    a, b, decay_rate, dt_bias, log_decay, beta, a_stride, b_stride,
    num_rows, x_stride, weight_stride, out_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, CHANNEL_TILE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    if a is not None:  # noqa: SIM102 (decided at compile time: without gates nothing of them may be compiled)
        if tl.program_id(1) * CHANNEL_TILE >= CHANNELS:
            gate_rows(
                a, b, decay_rate, dt_bias, log_decay, beta, a_stride, b_stride, rows, inside,
                tl.program_id(1) - tl.cdiv(CHANNELS, CHANNEL_TILE), HEADS,
            )  # fmt: skip
            return
    slot = tl.load(row_slots + rows, mask=inside, other=-1).to(tl.int64)
    place = tl.load(row_indices + rows, mask=inside, other=0)
    present = slot >= 0
    first = (rows - place).to(tl.int64)
    channel = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    along = channel < CHANNELS
    states += slot[:, None] * ((WIDTH - 1) * CHANNELS) + channel[None, :]
    total = tl.zeros([ROWS, CHANNEL_TILE], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=along, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH):
        # Below zero, places count back from the newest input of the state.
        staged = present & (place >= 0)
        committed = present & (place < 0)
        staged_inputs = tl.load(
            x + (first + place)[:, None] * x_stride + channel[None, :], mask=staged[:, None] & along[None, :], other=0.0
        )
        committed_inputs = tl.load(
            states + (WIDTH - 1 + place)[:, None] * CHANNELS, mask=committed[:, None] & along[None, :], other=0.0
        )
        inputs = tl.where(staged[:, None], staged_inputs.to(tl.float32), committed_inputs.to(tl.float32))
        tap = tl.load(weight + channel * weight_stride + (WIDTH - 1 - back), mask=along, other=0.0).to(tl.float32)
        total += inputs * tap[None, :]
        if parents is None:
            place -= 1
        else:
            up = tl.load(parents + first + place, mask=staged, other=0)
            place = tl.where(staged, up, place - 1)
    # Padding between a short tree's nodes and the next tree's comes out as zeros: what follows multiplies it by zero.
    result = tl.where(present[:, None], total * tl.sigmoid(total), 0.0)
    tl.store(
        out + rows.to(tl.int64)[:, None] * out_stride + channel[None, :],
        result.to(out.dtype.element_ty),
        mask=inside[:, None] & along[None, :],
    )


@triton.jit
def _prefill_kernel(
    x, weight, bias, states, slots, starts, out,
    a, b, decay_rate, dt_bias, log_decay, beta, a_stride, b_stride,
    x_stride, weight_stride, out_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, CHANNEL_TILE: tl.constexpr,
):  # fmt: skip
    first = tl.load(starts + tl.program_id(2))
    num_rows = tl.load(starts + tl.program_id(2) + 1) - first
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    if a is not None:  # noqa: SIM102 (decided at compile time: without gates nothing of them may be compiled)
        if tl.program_id(1) * CHANNEL_TILE >= CHANNELS:
            gate_rows(
                a, b, decay_rate, dt_bias, log_decay, beta, a_stride, b_stride, first + rows, inside,
                tl.program_id(1) - tl.cdiv(CHANNELS, CHANNEL_TILE), HEADS,
            )  # fmt: skip
            return
    channel = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    along = channel < CHANNELS
    x += first.to(tl.int64) * x_stride
    out += first.to(tl.int64) * out_stride
    states += tl.load(slots + tl.program_id(2)).to(tl.int64) * ((WIDTH - 1) * CHANNELS)
    total = tl.zeros([ROWS, CHANNEL_TILE], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=along, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH):
        inputs = _inputs(x, states, rows - back, inside, channel, along, x_stride, CHANNELS, WIDTH)
        tap = tl.load(weight + channel * weight_stride + (WIDTH - 1 - back), mask=along, other=0.0).to(tl.float32)
        total += inputs * tap[None, :]
    result = total * tl.sigmoid(total)
    tl.store(
        out + rows.to(tl.int64)[:, None] * out_stride + channel[None, :],
        result.to(out.dtype.element_ty),
        mask=inside[:, None] & along[None, :],
    )
    if (tl.program_id(0) == 0) & (num_rows > 0):
        kept = tl.arange(0, ROWS)  # at least as many as the state has
        newest = _inputs(
            x, states, num_rows - (WIDTH - 1) + kept, kept < WIDTH - 1, channel, along, x_stride, CHANNELS, WIDTH
        )
        tl.debug_barrier()  # other threads may still read the state
        tl.store(
            states + kept[:, None] * CHANNELS + channel[None, :],
            newest.to(states.dtype.element_ty),
            mask=(kept < WIDTH - 1)[:, None] & along[None, :],
        )


@triton.jit
def _inputs(
    x, states, places, wanted, channel, along, x_stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """[n, channels] fp32: row `places` [n] of `x`, or of the state, counting back from its newest, below zero."""
    staged, committed = wanted & (places >= 0), wanted & (places < 0)
    staged_inputs = tl.load(
        x + places.to(tl.int64)[:, None] * x_stride + channel[None, :],
        mask=staged[:, None] & along[None, :],
        other=0.0,
    )
    committed_inputs = tl.load(
        states + (WIDTH - 1 + places)[:, None] * CHANNELS + channel[None, :],
        mask=committed[:, None] & along[None, :],
        other=0.0,
    )
    return tl.where(staged[:, None], staged_inputs.to(tl.float32), committed_inputs.to(tl.float32))

