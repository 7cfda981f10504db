"""One step of the gated delta rule, and the fold of an accepted path: each state is read and written once, in place.

A program owns one state's tile of the value dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP_VALUES, COMMIT_VALUES = 16, 32  # of the value dim, per program


def step(mixed, log_decay, beta, states, slots, starts, shape, out) -> None:
    """Arguments as in `pooled.gated_delta_step_pooled`."""
    value_tile = min(STEP_VALUES, triton.next_power_of_2(shape.value_dim))
    grid = (triton.cdiv(shape.value_dim, value_tile), shape.num_value_heads, slots.shape[0])
    _step_kernel[grid](
        mixed, log_decay, beta, states, slots, starts, out,
        mixed.stride(0),
        shape.key_dim**-0.5,
        KEY_HEADS=shape.num_key_heads,
        VALUE_HEADS=shape.num_value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        KEY_TILE=triton.next_power_of_2(shape.key_dim),
        VALUE_TILE=value_tile,
        num_warps=2,
    )  # fmt: skip


def commit(states, keys, solved, log_decays, slots, starts, path, path_lengths) -> None:
    """Arguments as in `pooled.gated_delta_commit_pooled`."""
    num_layers, _, num_value_heads, key_dim, value_dim = states.shape
    value_tile = min(COMMIT_VALUES, max(16, triton.next_power_of_2(value_dim)))
    grid = (triton.cdiv(value_dim, value_tile), num_value_heads, num_layers * slots.shape[0])
    _commit_kernel[grid](
        states, keys, solved, log_decays, slots, starts, path, path_lengths,
        slots.shape[0],
        path.stride(0),
        states.stride(0), keys.stride(0), solved.stride(0), log_decays.stride(0),
        KEY_HEADS=keys.shape[2],
        VALUE_HEADS=num_value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_TILE=max(16, triton.next_power_of_2(key_dim)),
        VALUE_TILE=value_tile,
        num_warps=4,
        num_stages=1,
    )  # fmt: skip


@triton.jit
def _step_kernel(
    mixed, log_decay, beta, states, slots, starts, out, mixed_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(starts + sequence).to(tl.int64)
    if tl.load(starts + sequence + 1) <= row:
        return
    slot = tl.load(slots + sequence).to(tl.int64)
    along_key = tl.arange(0, KEY_TILE)
    along_value = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_key, in_value = along_key < KEY_DIM, along_value < VALUE_DIM
    places = states + ((slot * VALUE_HEADS + head) * KEY_DIM + along_key[:, None]) * VALUE_DIM + along_value[None, :]
    in_state = in_key[:, None] & in_value[None, :]
    state = tl.load(places, mask=in_state, other=0.0)

    mixed += row * mixed_stride
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    query = tl.load(mixed + key_head * KEY_DIM + along_key, mask=in_key, other=0.0).to(tl.float32)
    key = tl.load(mixed + (KEY_HEADS + key_head) * KEY_DIM + along_key, mask=in_key, other=0.0).to(tl.float32)
    value = tl.load(mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + along_value, mask=in_value, other=0.0)
    decay = tl.exp(tl.load(log_decay + row * VALUE_HEADS + head).to(tl.float32))
    strength = tl.load(beta + row * VALUE_HEADS + head).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
    query *= scale * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)

    state *= decay
    solution = strength * (value.to(tl.float32) - tl.sum(state * key[:, None], axis=0))
    state += key[:, None] * solution[None, :]
    tl.store(places, state, mask=in_state)
    result = tl.sum(state * query[:, None], axis=0)
    tl.store(
        out + (row * VALUE_HEADS + head) * VALUE_DIM + along_value, result.to(out.dtype.element_ty), mask=in_value
    )


@triton.jit
def _commit_kernel(
    states, keys, solved, log_decays, slots, starts, path, path_lengths, num_sequences, path_stride,
    states_stride, keys_stride, solved_stride, log_decays_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, layer = tl.program_id(2) % num_sequences, (tl.program_id(2) // num_sequences).to(tl.int64)
    length = tl.load(path_lengths + sequence)
    if length <= 0:
        return
    slot = tl.load(slots + sequence).to(tl.int64)
    first = tl.load(starts + sequence).to(tl.int64)
    path += sequence * path_stride
    along_key = tl.arange(0, KEY_TILE)
    along_value = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_key, in_value = along_key < KEY_DIM, along_value < VALUE_DIM
    keys += layer * keys_stride + (head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM
    solved += layer * solved_stride + head * VALUE_DIM
    log_decays += layer * log_decays_stride + head
    states += layer * states_stride + (slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    places = states + along_key[:, None] * VALUE_DIM + along_value[None, :]
    in_state = in_key[:, None] & in_value[None, :]

    last = tl.load(log_decays + (first + tl.load(path + length - 1)) * VALUE_HEADS)
    state = tl.load(places, mask=in_state, other=0.0) * tl.exp(last.to(tl.float32))
    for start in range(0, length, 16):
        steps = start + tl.arange(0, 16)
        there = steps < length
        rows = first + tl.load(path + steps, mask=there, other=0)
        # Keys lie in columns: [K, 16].
        key = tl.load(
            keys + rows[None, :] * (KEY_HEADS * KEY_DIM) + along_key[:, None],
            mask=there[None, :] & in_key[:, None],
            other=0.0,
        )
        solution = tl.load(
            solved + rows[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :],
            mask=there[:, None] & in_value[None, :],
            other=0.0,
        )
        since = tl.load(log_decays + rows * VALUE_HEADS, mask=there, other=0.0)
        weights = tl.where(there, tl.exp(tl.where(there, last - since, 0.0).to(tl.float32)), 0.0)
        state = tl.dot(key, solution * weights[:, None], state, input_precision="tf32x3")
    tl.store(places, state, mask=in_state)
