"""One step of the short convolution, and the fold of an accepted path: each state is read and written once, in place.

A program owns a tile of channels of one state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree.kernels.causal_conv.triton_gates import gate_arguments, gate_rows, gate_tiles

STEP_CHANNELS, COMMIT_CHANNELS = 256, 512


def step(x, weight, bias, states, slots, starts, out, gates) -> None:
    """Arguments as in `pooled.causal_conv_step_pooled`."""
    channels, width = weight.shape
    tiles = triton.cdiv(channels, STEP_CHANNELS)
    # The gates are those of the packed rows, of which there may be more than sequences.
    grid = (max(slots.shape[0], x.shape[0] if gates is not None else 0), tiles + gate_tiles(gates))
    _step_kernel[grid](
        x, weight, bias, states, slots, starts, out, *gate_arguments(gates),
        x.shape[0], slots.shape[0],
        x.stride(0), weight.stride(0), out.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        HEADS=1 if gates is None else gates.a.shape[1],
        CHANNEL_TILE=STEP_CHANNELS,
        num_warps=2,
    )  # fmt: skip


def commit(x, states, slots, starts, path, path_lengths) -> None:
    """Arguments as in `pooled.causal_conv_commit_pooled`."""
    num_layers, _, kept, channels = states.shape
    grid = (triton.cdiv(channels, COMMIT_CHANNELS), slots.shape[0], num_layers)
    _commit_kernel[grid](
        x, states, slots, starts, path, path_lengths,
        path.stride(0), x.stride(0), x.stride(1), states.stride(0),
        CHANNELS=channels,
        KEPT=kept,
        CHANNEL_TILE=COMMIT_CHANNELS,
        KEPT_TILE=triton.next_power_of_2(kept),
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _step_kernel(
    x, weight, bias, states, slots, starts, out,
    a, b, decay_rate, dt_bias, log_decay, beta, a_stride, b_stride,
    num_rows, num_sequences, x_stride, weight_stride, out_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, CHANNEL_TILE: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    if a is not None:  # noqa: SIM102 (decided at compile time: without gates nothing of them may be compiled)
        if tl.program_id(1) * CHANNEL_TILE >= CHANNELS:
            rows = sequence + tl.arange(0, 1)
            gate_rows(
                a, b, decay_rate, dt_bias, log_decay, beta, a_stride, b_stride, rows, rows < num_rows,
                tl.program_id(1) - tl.cdiv(CHANNELS, CHANNEL_TILE), HEADS,
            )  # fmt: skip
            return
    if sequence >= num_sequences:
        return
    row = tl.load(starts + sequence).to(tl.int64)
    if tl.load(starts + sequence + 1) <= row:
        return
    channel = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    along = channel < CHANNELS
    states += tl.load(slots + sequence).to(tl.int64) * ((WIDTH - 1) * CHANNELS) + channel
    newest = tl.load(x + row * x_stride + channel, mask=along, other=0.0)
    tap = tl.load(weight + channel * weight_stride + (WIDTH - 1), mask=along, other=0.0).to(tl.float32)
    total = newest.to(tl.float32) * tap
    if bias is not None:
        total += tl.load(bias + channel, mask=along, other=0.0).to(tl.float32)
    for place in tl.static_range(WIDTH - 1):
        inputs = tl.load(states + place * CHANNELS, mask=along, other=0.0)
        tap = tl.load(weight + channel * weight_stride + place, mask=along, other=0.0).to(tl.float32)
        total += inputs.to(tl.float32) * tap
        if place > 0:
            tl.store(states + (place - 1) * CHANNELS, inputs, mask=along)
    tl.store(states + (WIDTH - 2) * CHANNELS, newest.to(states.dtype.element_ty), mask=along)
    result = total * tl.sigmoid(total)
    tl.store(out + row * out_stride + channel, result.to(out.dtype.element_ty), mask=along)


@triton.jit
def _commit_kernel(
    x, states, slots, starts, path, path_lengths, path_stride, x_layer_stride, x_stride, states_stride,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, CHANNEL_TILE: tl.constexpr, KEPT_TILE: tl.constexpr,
):  # fmt: skip
    sequence, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(path_lengths + sequence)
    if length <= 0:
        return
    first = tl.load(starts + sequence).to(tl.int64)
    channel = tl.program_id(0) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    along = channel < CHANNELS
    states += layer * states_stride + tl.load(slots + sequence).to(tl.int64) * (KEPT * CHANNELS) + channel[None, :]
    x += layer * x_layer_stride + channel[None, :]
    kept = tl.arange(0, KEPT_TILE)
    # Places in the state followed by the path; its last rows stay.
    place = length + kept
    old, new = place < KEPT, (place >= KEPT) & (kept < KEPT)
    node = tl.load(path + sequence * path_stride + place - KEPT, mask=new, other=0)
    old_inputs = tl.load(states + place[:, None] * CHANNELS, mask=old[:, None] & along[None, :], other=0.0)
    new_inputs = tl.load(x + (first + node)[:, None] * x_stride, mask=new[:, None] & along[None, :], other=0.0)
    inputs = tl.where(new[:, None], new_inputs.to(states.dtype.element_ty), old_inputs)
    tl.debug_barrier()  # other threads may still read the state
    tl.store(states + kept[:, None] * CHANNELS, inputs, mask=(kept < KEPT)[:, None] & along[None, :])
