"""Walks of the gated delta rule in Triton: one binary for nodes, tokens and commits, so that their steps are the same.

A program owns one walk, a value head and a tile of the value dim, whose part of the state it carries along. One warp, and
sums over the key dim without a barrier; the next step's row is loaded while this one's is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

VALUES = 8  # of the value dim, per program


@triton.jit
def _row(
    mixed, log_decay, beta, row, key_head, head, along_key, along_value, in_key, in_value,
    WIDTH: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """What a step reads of its row."""
    source = mixed + row * WIDTH
    query = tl.load(source + key_head * KEY_DIM + along_key, mask=in_key, other=0.0)
    key = tl.load(source + (KEY_HEADS + key_head) * KEY_DIM + along_key, mask=in_key, other=0.0)
    value = tl.load(source + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + along_value, mask=in_value, other=0.0)
    gate = row * VALUE_HEADS + head
    return query, key, value, tl.load(log_decay + gate), tl.load(beta + gate)


@triton.jit(do_not_specialize=["num_walks", "num_slots", "path_stride", "num_steps", "kind", "mixed_stride", "gate_stride"])
def _walk_kernel(
    mixed, log_decay, beta, states, slots, firsts, paths, lengths, wanted, out,
    num_walks, num_slots, path_stride, num_steps, kind, mixed_stride, gate_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    tile, head = tl.program_id(0), tl.program_id(1)
    walk, layer = tl.program_id(2) % num_walks, (tl.program_id(2) // num_walks).to(tl.int64)
    slot = tl.load(slots + walk).to(tl.int64)
    length = tl.load(lengths + walk)
    along_key = tl.arange(0, KEY_TILE)
    along_value = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_key, in_value = along_key < KEY_DIM, along_value < VALUE_DIM
    out += head * VALUE_DIM + along_value
    if (slot < 0) | (length <= 0):
        if (kind == 0) & ((slot < 0) | (length == 0)):
            tl.store(out + walk.to(tl.int64) * (VALUE_HEADS * VALUE_DIM), tl.zeros([VALUE_TILE], out.dtype.element_ty), mask=in_value)
        return
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    mixed += layer * mixed_stride
    log_decay += layer * gate_stride
    beta += layer * gate_stride
    states += ((layer * num_slots + slot) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    places = states + along_key[:, None] * VALUE_DIM + along_value[None, :]
    in_state = in_key[:, None] & in_value[None, :]
    state = tl.load(places, mask=in_state, other=0.0)
    first = tl.load(firsts + walk).to(tl.int64)
    paths += walk.to(tl.int64) * path_stride + tl.where(kind == 0, num_steps - length, 0)
    from_step = tl.where(kind == 0, tl.load(wanted + walk), tl.where(kind == 1, 0, length))
    row = first + tl.load(paths)
    query, key, value, decay, strength = _row(
        mixed, log_decay, beta, row, key_head, head, along_key, along_value, in_key, in_value,
        WIDTH, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
    )  # fmt: skip
    for step in range(length):
        following = first + tl.load(paths + tl.minimum(step + 1, length - 1))
        next_query, next_key, next_value, next_decay, next_strength = _row(
            mixed, log_decay, beta, following, key_head, head, along_key, along_value, in_key, in_value,
            WIDTH, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        probe, unit = query.to(tl.float32), key.to(tl.float32)
        unit *= tl.rsqrt(tl.sum(unit * unit, axis=0) + 1e-6)
        probe *= scale * tl.rsqrt(tl.sum(probe * probe, axis=0) + 1e-6)
        state *= tl.exp(decay)
        solution = strength * (value.to(tl.float32) - tl.sum(state * unit[:, None], axis=0))
        state += unit[:, None] * solution[None, :]
        if step >= from_step:
            result = tl.sum(state * probe[:, None], axis=0)
            tl.store(out + row * (VALUE_HEADS * VALUE_DIM), result.to(out.dtype.element_ty), mask=in_value)
        row, query, key, value, decay, strength = following, next_query, next_key, next_value, next_decay, next_strength
    if kind != 0:
        tl.store(places, state, mask=in_state)


def walk(mixed, log_decay, beta, states, walks, shape, out) -> None:
    """Arguments as in `walk.gated_delta_walk_pooled`."""
    kind, slots, firsts, paths, lengths, wanted = walks
    num_layers, num_walks = states.shape[0], slots.shape[0]
    if not num_walks:
        return
    value_tile = min(VALUES, triton.next_power_of_2(shape.value_dim))
    grid = (triton.cdiv(shape.value_dim, value_tile), shape.num_value_heads, num_layers * num_walks)
    _walk_kernel[grid](
        mixed, log_decay, beta, states, slots, firsts, paths, lengths, lengths if wanted is None else wanted,
        mixed if out is None else out,
        num_walks, states.shape[1], paths.stride(0), paths.shape[1], kind, mixed.stride(0), log_decay.stride(0),
        shape.key_dim**-0.5,
        KEY_HEADS=shape.num_key_heads,
        VALUE_HEADS=shape.num_value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        KEY_TILE=triton.next_power_of_2(shape.key_dim),
        VALUE_TILE=value_tile,
        num_warps=1,
    )  # fmt: skip
