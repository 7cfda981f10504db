"""The gated delta rule of whole draft trees in one launch: the closed form, blocked (design.md §3).

A program owns one sequence, one value head and a tile of the value dim: it holds that part of the committed state
and solves its rows block by block. What a block needs of earlier ones (solved rows, log decays) it reads back from
the staged buffers, where it has put them itself.
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
class TreeTiles:
    """How a launch is cut up."""

    rows: int  # solved at once
    other_rows: int  # earlier rows taken at once
    values: int  # of the value dim, per program
    num_warps: int
    num_stages: int
    diagonal: int = 32  # of the rows solved at once, what is inverted at once


def tiles_for(max_rows: int, dtype: torch.dtype) -> TreeTiles:
    """By the most rows of a sequence; `benchmarks/kernels/gated_delta.py --sweep` measures the alternatives."""
    if dtype == torch.float32:  # twice the shared memory, of which some cards have 99 KB a block
        return TreeTiles(16, 32, 32, 4, 1)
    # More columns than rows: Triton then gives each warp columns of its own, and holds no operand twice.
    if max_rows <= 16:
        return TreeTiles(16, 32, 64, 4, 1)
    return TreeTiles(32, 32 if max_rows <= 32 else 64, 64, 8, 1)


def tree(
    mixed, log_decay, beta, ancestor_mask, states, slots, starts, max_rows, shape, out, keys, solved, log_decays,
    row_slots=None, tiles: TreeTiles | None = None,
) -> None:
    """Arguments as in `pooled.gated_delta_tree_pooled`."""
    tiles = tiles or tiles_for(max_rows, mixed.dtype)
    value_tile = min(tiles.values, max(16, triton.next_power_of_2(shape.value_dim)))
    grid = (triton.cdiv(shape.value_dim, value_tile), shape.num_value_heads, slots.shape[0])
    _tree_kernel[grid](
        mixed, log_decay, beta, ancestor_mask, states, slots, starts, row_slots, out, keys, solved, log_decays,
        mixed.stride(0),
        0 if ancestor_mask is None else ancestor_mask.stride(0),
        shape.key_dim**-0.5,
        KEY_HEADS=shape.num_key_heads,
        VALUE_HEADS=shape.num_value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        KEY_TILE=max(16, triton.next_power_of_2(shape.key_dim)),
        VALUE_TILE=value_tile,
        ROWS=tiles.rows,
        OTHER_ROWS=tiles.other_rows,
        SUMMED_ROWS=min(256, max(16, triton.next_power_of_2(max_rows))),
        DIAGONAL=min(tiles.diagonal, tiles.rows),
        CAUSAL=ancestor_mask is None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit
def _tree_kernel(
    mixed, log_decay, beta, ancestor_mask, states, slots, starts, row_slots, out, keys, solved, log_decays,
    mixed_stride, mask_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, OTHER_ROWS: tl.constexpr,
    SUMMED_ROWS: tl.constexpr, DIAGONAL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + sequence).to(tl.int64)
    num_rows = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    if num_rows <= 0:
        return
    slot = tl.load(slots + sequence).to(tl.int64)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    along_key = tl.arange(0, KEY_TILE)
    along_value = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_key, in_value = along_key < KEY_DIM, along_value < VALUE_DIM

    # The sequence's rows of this head.
    mixed += first * mixed_stride
    queries = mixed + key_head * KEY_DIM
    raw_keys = queries + KEY_HEADS * KEY_DIM
    values = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    log_decay += first * VALUE_HEADS + head
    beta += first * VALUE_HEADS + head
    log_decays += first * VALUE_HEADS + head
    solved += (first * VALUE_HEADS + head) * VALUE_DIM
    out += (first * VALUE_HEADS + head) * VALUE_DIM
    keys += (first * KEY_HEADS + key_head) * KEY_DIM
    if not CAUSAL:
        ancestor_mask += first * mask_stride

    state = tl.load(
        states + ((slot * VALUE_HEADS + head) * KEY_DIM + along_key[:, None]) * VALUE_DIM + along_value[None, :],
        mask=in_key[:, None] & in_value[None, :],
        other=0.0,
    )

    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < num_rows
        present = inside
        if row_slots is not None:
            present &= tl.load(row_slots + first + rows, mask=inside, other=-1) >= 0
        row_keys = present[:, None] & in_key[None, :]
        row_values = present[:, None] & in_value[None, :]
        written_values = inside[:, None] & in_value[None, :]
        query = tl.load(queries + rows[:, None] * mixed_stride + along_key[None, :], mask=row_keys, other=0.0)
        key = tl.load(raw_keys + rows[:, None] * mixed_stride + along_key[None, :], mask=row_keys, other=0.0)
        value = tl.load(values + rows[:, None] * mixed_stride + along_value[None, :], mask=row_values, other=0.0)
        strength = tl.load(beta + rows * VALUE_HEADS, mask=present, other=0.0).to(tl.float32)
        if CAUSAL:
            own = (rows[None, :] <= rows[:, None]) & (present[:, None] & present[None, :])
        else:
            own = _related(ancestor_mask, mask_stride, rows, rows, present, present)
        query_norm, key_norm = inverse_norms(query), inverse_norms(key)
        if (tile == 0) & (head % (VALUE_HEADS // KEY_HEADS) == 0):
            unit_key = key.to(tl.float32) * key_norm[:, None]
            written_keys = inside[:, None] & in_key[None, :]
            tl.store(keys + rows[:, None] * (KEY_HEADS * KEY_DIM) + along_key[None, :], unit_key, mask=written_keys)

        sums = tl.zeros([ROWS], tl.float64)
        for other in range(0, tl.minimum(start + ROWS, num_rows), SUMMED_ROWS):
            columns = other + tl.arange(0, SUMMED_ROWS)
            there = columns < num_rows
            if CAUSAL:
                related = (columns[None, :] <= rows[:, None]) & (present[:, None] & there[None, :])
            else:
                related = _related(ancestor_mask, mask_stride, rows, columns, present, there)
            terms = tl.load(log_decay + columns * VALUE_HEADS, mask=there, other=0.0).to(tl.float64)
            sums += tl.sum(tl.where(related, terms[None, :], 0.0), axis=1)
        tl.store(log_decays + rows * VALUE_HEADS, sums, mask=inside)

        # What the path so far, hence first of all the state, holds at the keys and at the queries.
        from_state = tl.exp(sums.to(tl.float32))
        by_key = dot_matrix(key, state, tl.zeros([ROWS, VALUE_TILE], tl.float32)) * from_state[:, None]
        by_query = dot_matrix(query, state, tl.zeros([ROWS, VALUE_TILE], tl.float32)) * from_state[:, None]
        for other in range(0, start, OTHER_ROWS):
            columns = other + tl.arange(0, OTHER_ROWS)
            there = columns < start  # the rest is not solved yet
            if CAUSAL:
                related = present[:, None] & there[None, :]
            else:
                related = _related(ancestor_mask, mask_stride, rows, columns, present, there)
            other_key = tl.load(
                raw_keys + columns[:, None] * mixed_stride + along_key[None, :],
                mask=there[:, None] & in_key[None, :],
                other=0.0,
            )
            other_solved = tl.load(
                solved + columns[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :],
                mask=there[:, None] & in_value[None, :],
                other=0.0,
            )
            other_sums = tl.load(log_decays + columns * VALUE_HEADS, mask=there, other=0.0)
            weights = decay_between(sums, other_sums, related) * inverse_norms(other_key)[None, :]
            # By selection: padding among the columns may be NaN.
            from_keys = tl.where(related, dot_rows(key, other_key) * weights, 0.0)
            from_queries = tl.where(related, dot_rows(query, other_key) * weights, 0.0)
            by_key = tl.dot(from_keys, other_solved, by_key, input_precision="tf32x3")
            by_query = tl.dot(from_queries, other_solved, by_query, input_precision="tf32x3")

        weights = decay_between(sums, sums, own) * key_norm[None, :]
        strict = rows[None, :] < rows[:, None]
        row_factor = (strength * key_norm)[:, None]
        system = tl.where(strict, dot_rows(key, key) * weights * row_factor, 0.0)
        right_side = strength[:, None] * (value.to(tl.float32) - key_norm[:, None] * by_key)
        solution = unit_lower_solve(system, right_side, ROWS, DIAGONAL)
        tl.store(
            solved + rows[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :], solution, mask=written_values
        )
        by_query = tl.dot(dot_rows(query, key) * weights, solution, by_query, input_precision="tf32x3")
        result = by_query * (scale * query_norm)[:, None]
        tl.store(
            out + rows[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :],
            result.to(out.dtype.element_ty),
            mask=written_values,
        )
        tl.debug_barrier()  # later blocks read what this one has stored, by other threads


@triton.jit
def _related(ancestor_mask, mask_stride, rows, columns, present, there):
    """[n, m] bool: column is row or its ancestor; false where `present` [n] or `there` [m] is."""
    marks = tl.load(
        ancestor_mask + rows[:, None] * mask_stride + columns[None, :],
        mask=present[:, None] & there[None, :],
        other=0,
    )
    return (marks != 0) & (columns[None, :] <= rows[:, None])
