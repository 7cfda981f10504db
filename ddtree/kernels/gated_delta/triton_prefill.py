"""Prefill of the gated delta rule in one launch: consecutive tokens, chunk after chunk (the closed form of each).

A program owns one value head of a sequence and a tile of the value dim, and carries that part of the state along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.kernels.gated_delta.triton_block import (
    decay_between,
    dot_matrix,
    dot_rows,
    inverse_norms,
    unit_lower_solve,
)


@dataclass(frozen=True)
class PrefillTiles:
    """How a launch is cut up."""

    rows: int  # tokens of a chunk
    values: int  # of the value dim, per program
    num_warps: int
    num_stages: int


def tiles_for(dtype: torch.dtype) -> PrefillTiles:
    """`benchmarks/kernels/gated_delta.py --sweep` measures the alternatives."""
    if dtype == torch.float32:  # twice the shared memory, of which some cards have 99 KB a block
        return PrefillTiles(16, 32, 4, 1)
    return PrefillTiles(32, 64, 8, 1)


def prefill(mixed, log_decay, beta, states, slots, starts, shape, out, tiles: PrefillTiles | None = None) -> None:
    """Arguments as in `pooled.gated_delta_prefill_pooled`."""
    tiles = tiles or tiles_for(mixed.dtype)
    value_tile = min(tiles.values, max(16, triton.next_power_of_2(shape.value_dim)))
    grid = (triton.cdiv(shape.value_dim, value_tile), shape.num_value_heads, slots.shape[0])
    _prefill_kernel[grid](
        mixed, log_decay, beta, states, slots, starts, out,
        mixed.stride(0),
        shape.key_dim**-0.5,
        KEY_HEADS=shape.num_key_heads,
        VALUE_HEADS=shape.num_value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        KEY_TILE=max(16, triton.next_power_of_2(shape.key_dim)),
        VALUE_TILE=value_tile,
        ROWS=tiles.rows,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit
def _prefill_kernel(
    mixed, log_decay, beta, states, slots, starts, out, mixed_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + sequence)
    num_rows = tl.load(starts + sequence + 1) - first
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    along_key = tl.arange(0, KEY_TILE)
    along_value = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_key, in_value = along_key < KEY_DIM, along_value < VALUE_DIM
    mixed += first.to(tl.int64) * mixed_stride
    out += first.to(tl.int64) * (VALUE_HEADS * VALUE_DIM)
    log_decay += first * VALUE_HEADS
    beta += first * VALUE_HEADS
    queries = mixed + key_head * KEY_DIM
    keys = queries + KEY_HEADS * KEY_DIM
    values = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    states += (tl.load(slots + sequence).to(tl.int64) * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    places = states + along_key[:, None] * VALUE_DIM + along_value[None, :]
    in_state = in_key[:, None] & in_value[None, :]
    state = tl.load(places, mask=in_state, other=0.0)

    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        present = rows < num_rows
        row_keys = present[:, None] & in_key[None, :]
        row_values = present[:, None] & in_value[None, :]
        offsets = rows.to(tl.int64)[:, None] * mixed_stride
        query = tl.load(queries + offsets + along_key[None, :], mask=row_keys, other=0.0)
        key = tl.load(keys + offsets + along_key[None, :], mask=row_keys, other=0.0)
        value = tl.load(values + offsets + along_value[None, :], mask=row_values, other=0.0)
        strength = tl.load(beta + rows * VALUE_HEADS + head, mask=present, other=0.0).to(tl.float32)
        terms = tl.load(log_decay + rows * VALUE_HEADS + head, mask=present, other=0.0).to(tl.float64)
        query_norm, key_norm = inverse_norms(query), inverse_norms(key)
        sums, total = tl.cumsum(terms, axis=0), tl.sum(terms, axis=0)

        from_state = tl.exp(sums.to(tl.float32))
        by_key = dot_matrix(key, state, tl.zeros([ROWS, VALUE_TILE], tl.float32)) * from_state[:, None]
        by_query = dot_matrix(query, state, tl.zeros([ROWS, VALUE_TILE], tl.float32)) * from_state[:, None]
        weights = decay_between(sums, sums, rows[None, :] <= rows[:, None]) * key_norm[None, :]
        row_factor = (strength * key_norm)[:, None]
        system = tl.where(rows[None, :] < rows[:, None], dot_rows(key, key) * weights * row_factor, 0.0)
        right_side = strength[:, None] * (value.to(tl.float32) - key_norm[:, None] * by_key)
        solution = unit_lower_solve(system, right_side, ROWS, 32)
        by_query = tl.dot(dot_rows(query, key) * weights, solution, by_query, input_precision="tf32x3")
        result = by_query * (scale * query_norm)[:, None]
        tl.store(
            out + rows.to(tl.int64)[:, None] * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + along_value[None, :],
            result.to(out.dtype.element_ty),
            mask=row_values,
        )
        # Rows behind the last token have no strength, hence no solution.
        to_end = tl.exp((total - sums).to(tl.float32)) * key_norm
        kept = state * tl.exp(total.to(tl.float32))
        state = dot_matrix(tl.trans(key), solution * to_end[:, None], kept)
    tl.store(places, state, mask=in_state)
