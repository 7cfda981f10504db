"""The gated delta rule of whole draft trees in three launches or four, none of which waits inside (design.md §3).

0. `sum_kernel`, of many blocks of rows: the log decays along each row's path, added up.
1. `prepare_kernel`, everything that no solved row is needed for, side by side: of each block its own system, inverted; for
   each pair of blocks the weights by which the solved rows of the earlier one reach the later one; for each block and tile
   of the value dim, what the committed state says to the solve and to the outputs.
2. `_solve_kernel`: forward substitution, block after block, in place of the right sides.
3. `_out_kernel`: the outputs.

Between them weights and parts of outputs lie in memory that the launches of a device share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.kernels.gated_delta.triton_prepare import prepare_kernel, sum_kernel

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
    pair_slice: int = 128  # the same for two blocks of rows
    summed_from: int = 4  # blocks, from which on a launch of its own sums the log decays of all paths first


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
    weights, parts = scratch_floats(max_rows, slots.shape[0], mixed.shape[0], shape, rows)
    scratch = scratch_for(mixed.device, 2 * weights + parts)
    to_keys, to_queries, recalled = scratch[:weights], scratch[weights : 2 * weights], scratch[2 * weights :]
    cut = {"VALUE_HEADS": shape.num_value_heads, "VALUE_DIM": shape.value_dim, "ROWS": rows}
    cut |= {"STAGES": tiles.num_stages, "num_warps": tiles.num_warps, "num_stages": 1}
    mask_stride, causal = (0, True) if ancestor_mask is None else (ancestor_mask.stride(0), False)
    summed = blocks >= tiles.summed_from
    if summed:
        sum_kernel[(blocks, num_heads)](
            log_decay, ancestor_mask, starts, row_slots, log_decays, mask_stride,
            VALUE_HEADS=shape.num_value_heads, ROWS=rows, SUMMED=SUMMED_ROWS, CAUSAL=causal, num_warps=tiles.num_warps,
        )  # fmt: skip
    group = shape.num_value_heads // shape.num_key_heads
    roles = 1 + triton.cdiv(shape.value_dim, state_tile) + triton.cdiv(blocks - 1, group)
    prepare_kernel[(roles, num_heads, blocks)](
        mixed, log_decay, beta, ancestor_mask, states, slots, starts, row_slots, keys, solved, log_decays,
        to_keys, to_queries, recalled,
        mixed.stride(0),
        mask_stride,
        shape.key_dim**-0.5,
        pairs,
        KEY_HEADS=shape.num_key_heads,
        KEY_DIM=shape.key_dim,
        KEY_TILE=key_tile,
        KEY_SLICE=min(tiles.key_slice, key_tile),
        PAIR_SLICE=min(tiles.pair_slice, key_tile),
        SUMMED=SUMMED_ROWS,
        CAUSAL=causal,
        GIVEN=summed,
        VALUE_TILE=state_tile,
        **cut,
    )  # fmt: skip
    _solve_kernel[(num_tiles, num_heads)](starts, to_keys, solved, pairs, VALUE_TILE=value_tile, **cut)
    _out_kernel[(num_tiles, num_heads, blocks)](starts, to_queries, recalled, solved, out, pairs, VALUE_TILE=value_tile, **cut)


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
