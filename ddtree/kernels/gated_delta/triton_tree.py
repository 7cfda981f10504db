"""The gated delta rule of whole draft trees: the closed form, blocked (design.md §3), here in one launch.

Most trees are quicker in three launches that do not wait inside (`triton_phases`); `tree` chooses.

A program owns one block of rows of one sequence, one value head and a tile of the value dim. What does not depend on
earlier blocks (norms, decays, what the state holds at its keys and queries, the inverse of its own system) all programs
compute at once; then block after block takes in the solved rows of those before it. They wait for one another by
counters: blocks are the slowest axis of the grid, programs start in its order, so whoever is waited for runs already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.kernels.gated_delta import triton_phases
from ddtree.kernels.gated_delta.triton_block import (
    decay_between,
    dot_matrix,
    dot_rows,
    inverse_norms,
    path_sums,
    related,
    unit_lower_inverse,
)


@dataclass(frozen=True)
class TreeTiles:
    """How a launch is cut up."""

    rows: int  # solved at once
    other_rows: int  # earlier rows taken at once
    values: int  # of the value dim, per program
    num_warps: int
    num_stages: int


def tiles_for(max_rows: int, dtype: torch.dtype) -> TreeTiles:
    """By the most rows of a sequence; `benchmarks/kernels/gated_delta.py --sweep` measures the alternatives."""
    if dtype == torch.float32:  # twice the shared memory, of which some cards have 99 KB a block
        return TreeTiles(16, 32, 32, 4, 1)
    # Measured on an H200 (docs/log.md); a block of more rows costs more than the blocks that it saves.
    if max_rows <= 96:
        return TreeTiles(16, 32, 64, 4, 1)
    return TreeTiles(16, 32, 128, 4, 1)


PHASES_FROM_ROWS = 33  # fewer are as quick in one launch


def phases_pay(max_rows: int, num_sequences: int, total_rows: int, shape) -> bool:
    """Whether three launches are quicker, and what lies between them has room."""
    rows = triton_phases.PhaseTiles().rows
    return max_rows >= PHASES_FROM_ROWS and triton_phases.fits(max_rows, num_sequences, total_rows, shape, rows)


_counters: dict[torch.device, torch.Tensor] = {}


def counters_for(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` int64 zeros that the launches of a device share, one launch after another; each leaves zeros behind.

    Never freed, as captured graphs keep their address: a larger one takes over, the smaller one stays. Two engines of one
    process that launch on different streams of one device must not share them.
    """
    if device not in _counters or len(_counters[device]) < count:
        _kept.append(_counters.get(device))
        size = max(count, 16384)
        with torch.inference_mode(False):
            _counters[device] = torch.zeros(size, dtype=torch.int64, device=device)
    return _counters[device]


_kept: list = []


def tree(
    mixed, log_decay, beta, ancestor_mask, states, slots, starts, max_rows, shape, out, keys, solved, log_decays,
    row_slots=None, tiles: TreeTiles | triton_phases.PhaseTiles | None = None,
) -> None:
    """Arguments as in `pooled.gated_delta_tree_pooled`. ValueError for more rows than the launch has bits for."""
    given = (mixed, log_decay, beta, ancestor_mask, states, slots, starts, max_rows, shape, out, keys, solved, log_decays)
    if tiles is None and phases_pay(max_rows, slots.shape[0], mixed.shape[0], shape):
        tiles = triton_phases.PhaseTiles()
    if isinstance(tiles, triton_phases.PhaseTiles):
        triton_phases.tree(*given, row_slots, tiles)
        return
    tiles = tiles or tiles_for(max_rows, mixed.dtype)
    if max_rows > 65 * tiles.rows:
        raise ValueError(f"max_rows must be at most {65 * tiles.rows} in one launch, got {max_rows}: split the sequence")
    value_tile = min(tiles.values, max(16, triton.next_power_of_2(shape.value_dim)))
    num_tiles, num_heads = triton.cdiv(shape.value_dim, value_tile), shape.num_value_heads * slots.shape[0]
    grid = (num_tiles, num_heads, triton.cdiv(max_rows, tiles.rows))
    _tree_kernel[grid](
        mixed, log_decay, beta, ancestor_mask, states, slots, starts, row_slots, out, keys, solved, log_decays,
        counters_for(mixed.device, 2 * num_tiles * num_heads),
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
        SUMMED_ROWS=min(64, max(16, triton.next_power_of_2(max_rows))),
        CAUSAL=ancestor_mask is None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit
def _tree_kernel(
    mixed, log_decay, beta, ancestor_mask, states, slots, starts, row_slots, out, keys, solved, log_decays,
    counters, mixed_stride, mask_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, OTHER_ROWS: tl.constexpr,
    SUMMED_ROWS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    tile, head, sequence = tl.program_id(0), tl.program_id(1) % VALUE_HEADS, tl.program_id(1) // VALUE_HEADS
    start = tl.program_id(2) * ROWS
    first = tl.load(starts + sequence).to(tl.int64)
    num_rows = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    if num_rows <= start:
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
    own = related(ancestor_mask, mask_stride, rows, rows, present, present, CAUSAL)
    end = tl.minimum(start + ROWS, num_rows)
    sums = path_sums(log_decay, ancestor_mask, mask_stride, rows, present, end, VALUE_HEADS, SUMMED_ROWS, CAUSAL)
    tl.store(log_decays + rows * VALUE_HEADS, sums, mask=inside)
    alone = num_rows <= ROWS
    summed = counters + 2 * ((sequence * VALUE_HEADS + head) * tl.num_programs(0) + tile)
    done = summed + 1
    if end < num_rows:
        tl.debug_barrier()  # all threads have stored before one of them says so
        tl.atomic_add(summed, tl.full([], 1, tl.int64) << (start // ROWS), sem="release")

    # What the state holds at the keys and at the queries; the block's own system, inverted.
    query_norm, key_norm = inverse_norms(query), inverse_norms(key)
    if (tile == 0) & (head % (VALUE_HEADS // KEY_HEADS) == 0):
        unit_key = key.to(tl.float32) * key_norm[:, None]
        written_keys = inside[:, None] & in_key[None, :]
        tl.store(keys + rows[:, None] * (KEY_HEADS * KEY_DIM) + along_key[None, :], unit_key, mask=written_keys)
    from_state = tl.exp(sums.to(tl.float32))
    by_key = dot_matrix(key, state, tl.zeros([ROWS, VALUE_TILE], tl.float32)) * from_state[:, None]
    by_query = dot_matrix(query, state, tl.zeros([ROWS, VALUE_TILE], tl.float32)) * from_state[:, None]
    own_weights = decay_between(sums, sums, own) * key_norm[None, :]
    strict = rows[None, :] < rows[:, None]
    system = tl.where(strict, dot_rows(key, key) * own_weights * (strength * key_norm)[:, None], 0.0)
    inverse = unit_lower_inverse(system, ROWS)
    own_queries = dot_rows(query, key) * own_weights

    for other in range(0, start, OTHER_ROWS):
        columns = other + tl.arange(0, OTHER_ROWS)
        there = columns < start
        blocks = tl.cdiv(tl.minimum(other + OTHER_ROWS, start), ROWS)
        # Each block by its own bit: later ones may have been quicker.
        needed = ((tl.full([], 2, tl.int64) << (blocks - 1 - other // ROWS)) - 1) << (other // ROWS)
        while (tl.atomic_add(summed, 0, sem="acquire") & needed) != needed:
            pass
        tl.debug_barrier()
        reached = related(ancestor_mask, mask_stride, rows, columns, present, there, CAUSAL)
        other_key = tl.load(
            raw_keys + columns[:, None] * mixed_stride + along_key[None, :],
            mask=there[:, None] & in_key[None, :],
            other=0.0,
        )
        other_sums = tl.load(log_decays + columns * VALUE_HEADS, mask=there, other=0.0, cache_modifier=".cg")
        weights = decay_between(sums, other_sums, reached) * inverse_norms(other_key)[None, :]
        # By selection: padding among the columns may be NaN.
        from_keys = tl.where(reached, dot_rows(key, other_key) * weights, 0.0)
        from_queries = tl.where(reached, dot_rows(query, other_key) * weights, 0.0)
        while tl.atomic_add(done, 0, sem="acquire") < blocks:
            pass
        tl.debug_barrier()
        other_solved = tl.load(
            solved + columns[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :],
            mask=there[:, None] & in_value[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        by_key = tl.dot(from_keys, other_solved, by_key, input_precision="tf32x3")
        by_query = tl.dot(from_queries, other_solved, by_query, input_precision="tf32x3")

    right_side = strength[:, None] * (value.to(tl.float32) - key_norm[:, None] * by_key)
    solution = tl.dot(inverse, right_side, input_precision="tf32x3")
    tl.store(
        solved + rows[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :], solution, mask=written_values
    )
    if not alone:
        if start + ROWS < num_rows:
            tl.debug_barrier()
            tl.atomic_add(done, 1, sem="release")
        else:
            # Nobody waits any more: all blocks before this one have said that they are done.
            tl.store(summed, 0)
            tl.store(done, 0)
    by_query = tl.dot(own_queries, solution, by_query, input_precision="tf32x3")
    result = by_query * (scale * query_norm)[:, None]
    tl.store(
        out + rows[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :],
        result.to(out.dtype.element_ty),
        mask=written_values,
    )
