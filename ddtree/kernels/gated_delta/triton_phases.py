"""The gated delta rule of whole draft trees in three launches, none of which waits inside (design.md §3).

1. `_prepare_kernel`, everything that no solved row is needed for, side by side: for each pair of a block of rows and one
   before it (or itself) the weights by which the latter's solved rows reach the former, its own system inverted; for each
   block and tile of the value dim, what the committed state says to the solve and to the outputs.
2. `_solve_kernel`: forward substitution, block after block, in place of the right sides.
3. `_out_kernel`: the outputs.

Between them weights and parts of outputs lie in memory that the launches of a device share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.kernels.gated_delta.triton_block import (
    L2_EPS,
    decay_between,
    dot_matrix,
    dot_rows,
    inverse_norms,
    path_sums,
    related,
    unit_lower_inverse,
)

MOST_SCRATCH_BYTES = 256 << 20
SUMMED_ROWS = 64  # whose log decays are added at once


@dataclass(frozen=True)
class PhaseTiles:
    """How the launches are cut up."""

    rows: int = 32  # solved at once: 16 or 32
    values: int = 64  # of the value dim, per program
    state_values: int = 128  # the same where the state is read
    key_slice: int = 32  # of the key dim, multiplied with the state at once
    num_warps: int = 4
    num_stages: int = 3
    state_registers: int | None = None  # most of a thread in the first launch


_scratch: dict[torch.device, torch.Tensor] = {}
_kept: list = []


def scratch_for(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` floats that the launches of a device share, one layer after another. As with `counters_for`: never
    freed, and not for two engines that launch on different streams of one device.
    """
    if device not in _scratch or len(_scratch[device]) < count:
        _kept.append(_scratch.get(device))
        with torch.inference_mode(False):
            _scratch[device] = torch.empty(triton.next_power_of_2(count), dtype=torch.float32, device=device)
    return _scratch[device]


def scratch_floats(max_rows: int, num_sequences: int, total_rows: int, shape, rows: int) -> tuple[int, int]:
    """Of one kind of weights, of the parts of the outputs."""
    blocks = triton.cdiv(max_rows, rows)
    weights = num_sequences * shape.num_value_heads * (blocks * (blocks + 1) // 2) * rows * rows
    return weights, total_rows * shape.num_value_heads * shape.value_dim


def fits(max_rows: int, num_sequences: int, total_rows: int, shape, rows: int) -> bool:
    weights, parts = scratch_floats(max_rows, num_sequences, total_rows, shape, rows)
    return 4 * (2 * weights + parts) <= MOST_SCRATCH_BYTES


def tree(
    mixed, log_decay, beta, ancestor_mask, states, slots, starts, max_rows, shape, out, keys, solved, log_decays,
    row_slots=None, tiles: PhaseTiles | None = None,
) -> None:
    """Arguments as in `pooled.gated_delta_tree_pooled`."""
    tiles = tiles or PhaseTiles()
    rows, num_heads = tiles.rows, shape.num_value_heads * slots.shape[0]
    blocks = triton.cdiv(max_rows, rows)
    pairs = blocks * (blocks + 1) // 2
    widest = max(16, triton.next_power_of_2(shape.value_dim))
    value_tile, state_tile = min(tiles.values, widest), min(tiles.state_values, widest)
    key_tile = max(16, triton.next_power_of_2(shape.key_dim))
    num_tiles = triton.cdiv(shape.value_dim, value_tile)
    limits = {} if tiles.state_registers is None else {"maxnreg": tiles.state_registers}
    weights, parts = scratch_floats(max_rows, slots.shape[0], mixed.shape[0], shape, rows)
    scratch = scratch_for(mixed.device, 2 * weights + parts)
    to_keys, to_queries, recalled = scratch[:weights], scratch[weights : 2 * weights], scratch[2 * weights :]
    cut = {"VALUE_HEADS": shape.num_value_heads, "VALUE_DIM": shape.value_dim, "ROWS": rows}
    cut |= {"STAGES": tiles.num_stages, "num_warps": tiles.num_warps, "num_stages": 1}
    _prepare_kernel[(blocks + triton.cdiv(shape.value_dim, state_tile), num_heads, blocks)](
        mixed, log_decay, beta, ancestor_mask, states, slots, starts, row_slots, keys, solved, log_decays,
        to_keys, to_queries, recalled,
        mixed.stride(0),
        0 if ancestor_mask is None else ancestor_mask.stride(0),
        shape.key_dim**-0.5,
        pairs,
        blocks,
        KEY_HEADS=shape.num_key_heads,
        KEY_DIM=shape.key_dim,
        KEY_TILE=key_tile,
        KEY_SLICE=min(tiles.key_slice, key_tile),
        SUMMED=SUMMED_ROWS,
        CAUSAL=ancestor_mask is None,
        VALUE_TILE=state_tile,
        **cut,
        **limits,
    )  # fmt: skip
    _solve_kernel[(num_tiles, num_heads)](starts, to_keys, solved, pairs, VALUE_TILE=value_tile, **cut)
    _out_kernel[(num_tiles, num_heads, blocks)](starts, to_queries, recalled, solved, out, pairs, VALUE_TILE=value_tile, **cut)


@triton.jit
def _prepare_kernel(
    mixed, log_decay, beta, ancestor_mask, states, slots, starts, row_slots, keys, solved, log_decays,
    to_keys, to_queries, recalled, mixed_stride, mask_stride, scale, pairs, blocks,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, KEY_SLICE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr,
    SUMMED: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The first programs of a block of rows: one for each block up to it. The others: one for each tile of the value dim.
    role, block = tl.program_id(0), tl.program_id(2)
    head, sequence = tl.program_id(1) % VALUE_HEADS, tl.program_id(1) // VALUE_HEADS
    if (role < blocks) & (role > block):
        return
    first = tl.load(starts + sequence).to(tl.int64)
    num_rows = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    slot = tl.load(slots + sequence).to(tl.int64)
    if num_rows <= block * ROWS:
        return
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    mixed += first * mixed_stride
    queries = mixed + key_head * KEY_DIM
    raw_keys = queries + KEY_HEADS * KEY_DIM
    log_decay += first * VALUE_HEADS + head
    if not CAUSAL:
        ancestor_mask += first * mask_stride
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    present = inside
    if row_slots is not None:
        present &= tl.load(row_slots + first + rows, mask=inside, other=-1) >= 0
    strength = tl.load(beta + (first + rows) * VALUE_HEADS + head, mask=present, other=0.0).to(tl.float32)
    end = tl.minimum((block + 1) * ROWS, num_rows)

    if role < blocks:
        along_key = tl.arange(0, KEY_TILE)
        in_key = along_key < KEY_DIM
        columns = role * ROWS + tl.arange(0, ROWS)
        there = columns < num_rows
        if row_slots is not None:
            there &= tl.load(row_slots + first + columns, mask=there, other=-1) >= 0
        row_places = rows[:, None] * mixed_stride + along_key[None, :]
        query = tl.load(queries + row_places, mask=present[:, None] & in_key[None, :], other=0.0)
        key = tl.load(raw_keys + row_places, mask=present[:, None] & in_key[None, :], other=0.0)
        other_key = tl.load(
            raw_keys + columns[:, None] * mixed_stride + along_key[None, :],
            mask=there[:, None] & in_key[None, :],
            other=0.0,
        )
        sums = path_sums(log_decay, ancestor_mask, mask_stride, rows, present, end, VALUE_HEADS, SUMMED, CAUSAL)
        other_sums = sums
        if role != block:
            end = (role + 1) * ROWS
            other_sums = path_sums(log_decay, ancestor_mask, mask_stride, columns, there, end, VALUE_HEADS, SUMMED, CAUSAL)
        reached = related(ancestor_mask, mask_stride, rows, columns, present, there, CAUSAL)
        weights = decay_between(sums, other_sums, reached) * inverse_norms(other_key)[None, :]
        key_norm = inverse_norms(key)
        by_query = dot_rows(query, other_key) * weights * (scale * inverse_norms(query))[:, None]
        by_key = dot_rows(key, other_key) * weights * (0.0 - strength * key_norm)[:, None]
        if role == block:
            strict = rows[None, :] < rows[:, None]
            by_key = unit_lower_inverse(tl.where(strict, 0.0 - by_key, 0.0), ROWS)
            tl.store(log_decays + (first + rows) * VALUE_HEADS + head, sums, mask=inside)
            if head % (VALUE_HEADS // KEY_HEADS) == 0:
                key_places = ((first + rows) * KEY_HEADS + key_head)[:, None] * KEY_DIM + along_key[None, :]
                unit_key = key.to(tl.float32) * key_norm[:, None]
                tl.store(keys + key_places, unit_key, mask=inside[:, None] & in_key[None, :])
        tile = (tl.program_id(1).to(tl.int64) * pairs + block * (block + 1) // 2 + role) * (ROWS * ROWS)
        tile += tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(to_keys + tile, by_key)
        tl.store(to_queries + tile, by_query)
    else:
        along_value = (role - blocks) * VALUE_TILE + tl.arange(0, VALUE_TILE)
        in_value = along_value < VALUE_DIM
        value_places = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + rows[:, None] * mixed_stride + along_value[None, :]
        value = tl.load(mixed + value_places, mask=present[:, None] & in_value[None, :], other=0.0)
        state_rows = states + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + along_value[None, :]
        from_key = tl.zeros([ROWS, VALUE_TILE], tl.float32)
        from_query = tl.zeros([ROWS, VALUE_TILE], tl.float32)
        key_square = tl.zeros([ROWS], tl.float32)
        query_square = tl.zeros([ROWS], tl.float32)
        for part in tl.range(0, KEY_TILE, KEY_SLICE, num_stages=STAGES):
            along = part + tl.arange(0, KEY_SLICE)
            part_places = rows[:, None] * mixed_stride + along[None, :]
            part_mask = present[:, None] & (along < KEY_DIM)[None, :]
            part_key = tl.load(raw_keys + part_places, mask=part_mask, other=0.0)
            part_query = tl.load(queries + part_places, mask=part_mask, other=0.0)
            state_mask = (along < KEY_DIM)[:, None] & in_value[None, :]
            state = tl.load(state_rows + along[:, None] * VALUE_DIM, mask=state_mask, other=0.0)
            from_key = dot_matrix(part_key, state, from_key)
            from_query = dot_matrix(part_query, state, from_query)
            key_square += tl.sum(part_key.to(tl.float32) * part_key.to(tl.float32), axis=1)
            query_square += tl.sum(part_query.to(tl.float32) * part_query.to(tl.float32), axis=1)
        sums = path_sums(log_decay, ancestor_mask, mask_stride, rows, present, end, VALUE_HEADS, SUMMED, CAUSAL)
        from_state = tl.exp(sums.to(tl.float32))
        from_key *= (from_state * tl.rsqrt(key_square + L2_EPS))[:, None]
        from_query *= (from_state * tl.rsqrt(query_square + L2_EPS) * scale)[:, None]
        places = ((first + rows) * VALUE_HEADS + head)[:, None] * VALUE_DIM + along_value[None, :]
        written = inside[:, None] & in_value[None, :]
        tl.store(solved + places, strength[:, None] * (value.to(tl.float32) - from_key), mask=written)
        tl.store(recalled + places, from_query, mask=written)


@triton.jit
def _solve_kernel(
    starts, to_keys, solved, pairs,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1) % VALUE_HEADS, tl.program_id(1) // VALUE_HEADS
    first = tl.load(starts + sequence).to(tl.int64)
    num_rows = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    along = tl.arange(0, ROWS)
    along_value = tl.program_id(0) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_value = along_value < VALUE_DIM
    places = along[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :]
    block_stride: tl.constexpr = ROWS * VALUE_HEADS * VALUE_DIM
    solved += (first * VALUE_HEADS + head) * VALUE_DIM
    to_keys += tl.program_id(1).to(tl.int64) * pairs * (ROWS * ROWS) + along[:, None] * ROWS + along[None, :]
    next_rest = tl.load(solved + places, mask=(along < num_rows)[:, None] & in_value[None, :], other=0.0)
    next_inverse = tl.load(to_keys)
    for block in range(0, tl.cdiv(num_rows, ROWS)):
        inside = (block * ROWS + along < num_rows)[:, None] & in_value[None, :]
        mine = solved + block * block_stride + places
        tiles = to_keys + block * (block + 1) // 2 * (ROWS * ROWS)
        rest, inverse = next_rest, next_inverse
        # What the next block starts from depends on nothing here: on its way while this one is solved.
        following = (block + 1) * ROWS < num_rows
        next_inside = ((block + 1) * ROWS + along < num_rows)[:, None] & in_value[None, :]
        next_rest = tl.load(mine + block_stride, mask=next_inside, other=0.0)
        next_inverse = tl.load(tiles + (2 * block + 2) * (ROWS * ROWS), mask=following, other=0.0)
        for other in tl.range(0, block, num_stages=STAGES):
            weights = tl.load(tiles + other * (ROWS * ROWS))
            other_solved = tl.load(solved + other * block_stride + places, mask=in_value[None, :], other=0.0)
            rest = tl.dot(weights, other_solved, rest, input_precision="tf32x3")
        tl.store(mine, tl.dot(inverse, rest, input_precision="tf32x3"), mask=inside)
        tl.debug_barrier()  # the next block reads it


@triton.jit
def _out_kernel(
    starts, to_queries, recalled, solved, out, pairs,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(2)
    head, sequence = tl.program_id(1) % VALUE_HEADS, tl.program_id(1) // VALUE_HEADS
    first = tl.load(starts + sequence).to(tl.int64)
    num_rows = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    if num_rows <= block * ROWS:
        return
    along = tl.arange(0, ROWS)
    along_value = tl.program_id(0) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_value = along_value < VALUE_DIM
    places = (first * VALUE_HEADS + head) * VALUE_DIM + along[:, None] * (VALUE_HEADS * VALUE_DIM) + along_value[None, :]
    block_stride: tl.constexpr = ROWS * VALUE_HEADS * VALUE_DIM
    to_queries += (tl.program_id(1).to(tl.int64) * pairs + block * (block + 1) // 2) * (ROWS * ROWS)
    to_queries += along[:, None] * ROWS + along[None, :]
    inside = (block * ROWS + along < num_rows)[:, None] & in_value[None, :]
    result = tl.load(recalled + block * block_stride + places, mask=inside, other=0.0)
    for other in tl.range(0, block + 1, num_stages=STAGES):
        weights = tl.load(to_queries + other * (ROWS * ROWS))
        there = (other * ROWS + along < num_rows)[:, None] & in_value[None, :]
        other_solved = tl.load(solved + other * block_stride + places, mask=there, other=0.0)
        result = tl.dot(weights, other_solved, result, input_precision="tf32x3")
    tl.store(out + block * block_stride + places, result.to(out.dtype.element_ty), mask=inside)
