"""The best-first tree in Triton: one program a sequence, level by level as in ddtree.tree.build; then the rows' layout.

A level holds at most `budget` nodes, sorted by (cost, lex), where lex is a node's place among its level's by its tuple
of ranks. Child r of the i-th best parent can matter only when (i + 1)(r + 1) <= budget: O(budget log budget) pairs, one
fixed table. The ceiling is the budget-th least cost of all nodes so far, found by bisection; children above it go.
What must move between threads goes through scratch in memory, behind a barrier.

Costs are whole numbers of 2^-40 nats in int64, so sums are exact and equal scores are ties, not roundings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.tree_build.buffers import TreeBuffers
from ddtree.kernels.tree_build.triton_ceiling import first_ceiling
from ddtree.kernels.tree_build.triton_order import write_tree

NO_COST = tl.constexpr(1 << 62)  # of an excluded token, and of nothing
RANK_BITS = tl.constexpr(11)
# Pairs that a program may hold -> its warps, and the tile in which it counts (nodes, others).
SHAPES = ((512, 4, 32, 32), (1024, 4, 64, 32), (4096, 8, 64, 64), (8192, 16, 64, 64))
BOUNDED_PAIRS = 2048  # from so many on a first ceiling costs less than it saves
ROW_TILE = 8  # rows that a program of the layout writes


@triton.jit
def _costs(log_probs):
    """int64 units of 2^-40 nats, rounded half to even, as NumPy's rint."""
    units = tl.minimum(-log_probs, 131072.0).to(tl.float64) * 1099511627776.0
    # Adding and taking away 2^52 rounds what is below it; what is above is whole already.
    return tl.where(units < 4503599627370496.0, (units + 4503599627370496.0) - 4503599627370496.0, units).to(tl.int64)


@triton.jit
def _count(flags):
    return tl.sum(flags.to(tl.int32), axis=0)


@triton.jit
def _ceiling(best, costs, high, budget):
    """The budget-th least of both, where both together hold at least so many up to `high`."""
    low = tl.full([], -1, tl.int64)
    count = tl.full([], -1, tl.int32)
    # Fewer than budget are <= low, at least budget are <= high. Without ties at the cut a count hits it early.
    while (high - low > 1) & (count != budget):
        middle = (low + high) >> 1
        count = tl.sum((best <= middle).to(tl.int32) + (costs <= middle).to(tl.int32), axis=0)
        low, high = tl.where(count >= budget, low, middle), tl.where(count >= budget, middle, high)
    below = tl.maximum(tl.where(best <= high, best, -1), tl.where(costs <= high, costs, -1))
    return tl.max(below, axis=0)


@triton.jit
def _sort_level(kid_costs, kid_keys, kid_pairs, node_costs, node_parents, node_ranks, node_lexes, number, size, first,
                BLOCK: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr):  # fmt: skip
    """Write the `size` best of `number` children to their places in the level."""
    for start in range(0, number, MINE):
        mine = start + tl.arange(0, MINE)
        cost = tl.load(kid_costs + mine, mask=mine < number, other=NO_COST)
        key = tl.load(kid_keys + mine, mask=mine < number, other=0)
        place, lex = mine, mine
        # The root's children lie in order already.
        if not first:
            # The place in the low half, lex in the high one.
            counts = tl.zeros([MINE, OTHERS], tl.int32)
            for other_start in range(0, number, OTHERS):
                others = other_start + tl.arange(0, OTHERS)
                other_cost = tl.load(kid_costs + others, mask=others < number, other=NO_COST)[None, :]
                other_key = tl.load(kid_keys + others, mask=others < number, other=2147483647)[None, :]
                earlier = other_key < key[:, None]
                better = (other_cost < cost[:, None]) | ((other_cost == cost[:, None]) & earlier)
                counts += better.to(tl.int32) + (earlier.to(tl.int32) << 16)
            total = tl.sum(counts, axis=1)
            place, lex = total & 0xFFFF, total >> 16
        kept = (mine < number) & (place < size)
        pair = tl.load(kid_pairs + mine, mask=kept, other=0)
        tl.store(node_costs + place, cost, mask=kept)
        tl.store(node_parents + place, pair >> 16, mask=kept)
        tl.store(node_ranks + place, pair & 0xFFFF, mask=kept)
        tl.store(node_lexes + place, lex, mask=kept)
    rest = tl.arange(0, BLOCK)
    tl.store(node_costs + rest, tl.full([BLOCK], NO_COST, tl.int64), mask=rest >= size)


@triton.jit
def _grow_kernel(
    root_tokens, token_ids, log_probs, budgets, num_depths, starts, counts,
    out_tokens, out_parents, out_depths, out_scores,
    node_costs, node_parents, node_ranks, node_lexes, kid_costs, kid_keys, kid_pairs,
    alive_costs, alive_nodes, places, new_indices, lex_paths, pairs, bests,
    num_rows, max_budget, depths, width,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    node_costs += b * (LEVELS * BLOCK)
    node_parents += b * (LEVELS * BLOCK)
    node_ranks += b * (LEVELS * BLOCK)
    node_lexes += b * (LEVELS * BLOCK)
    alive_costs += b * (LEVELS * BLOCK)
    alive_nodes += b * (LEVELS * BLOCK)
    places += b * (LEVELS * BLOCK)
    new_indices += b * (LEVELS * BLOCK)
    lex_paths += b * (LEVELS * BLOCK * LEVELS)
    kid_costs += b * PAIRS
    kid_keys += b * PAIRS
    kid_pairs += b * PAIRS
    bests += b * BLOCK
    token_ids += b * depths * width
    log_probs += b * depths * width
    start = tl.load(starts + b)
    room = tl.minimum(tl.load(starts + b + 1), num_rows) - start - 1
    budget = tl.minimum(tl.minimum(tl.load(budgets + b), max_budget), room)
    limit = tl.minimum(tl.load(num_depths + b), depths)

    entries = tl.arange(0, PAIRS)
    tl.store(node_costs, 0)
    tl.store(node_lexes, 0)
    best = tl.full([PAIRS], NO_COST, tl.int64)
    seen = tl.full([], 0, tl.int32)
    ceiling = tl.full([], NO_COST - 1, tl.int64)
    if BOUNDED:
        ceiling = first_ceiling(log_probs, kid_keys, budget, limit, width, BLOCK, LEVELS)
    size = tl.where(budget > 0, 1, 0)
    depth = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    while (depth < limit) & (size > 0):
        level = depth * BLOCK
        # Read anew at each level: registers are what a program of 8,192 pairs is short of.
        pair = tl.load(pairs + entries)
        parent, rank = pair >> 16, pair & 0xFFFF
        have = ((parent + 1) * (rank + 1) <= budget) & (rank < width) & (parent < size)
        log_prob = tl.load(log_probs + depth * width + rank, mask=have, other=float("-inf"))
        allowed = log_prob > float("-inf")
        cost = tl.load(node_costs + level + parent, mask=have, other=0) + _costs(tl.where(allowed, log_prob, 0.0))
        cost = tl.where(have & allowed & (cost <= ceiling), cost, NO_COST)
        if seen + _count(cost < NO_COST) >= budget:
            high = tl.max(tl.maximum(tl.where(best < NO_COST, best, 0), tl.where(cost < NO_COST, cost, 0)), axis=0)
            ceiling = _ceiling(best, cost, tl.minimum(high, ceiling), budget)
        keep, alive = cost <= ceiling, best <= ceiling
        key = (tl.load(node_lexes + level + (pair >> 16), mask=keep, other=0) << RANK_BITS) + (pair & 0xFFFF)
        # Two running counts in one scan: neither passes 2^15.
        scan = tl.cumsum(keep.to(tl.int32) + (alive.to(tl.int32) << 16), axis=0)
        kid, old = (scan & 0xFFFF) - 1, (scan >> 16) - 1
        number, seen = _count(keep), _count(alive)
        tl.store(bests + old, best, mask=alive)
        tl.store(bests + seen + kid, cost, mask=keep & (seen + kid < budget))
        tl.store(kid_costs + kid, cost, mask=keep)
        tl.store(kid_keys + kid, key, mask=keep)
        tl.store(kid_pairs + kid, pair, mask=keep)
        tl.debug_barrier()
        seen = tl.minimum(seen + number, budget)
        best = tl.load(bests + entries, mask=entries < seen, other=NO_COST)
        size = tl.minimum(number, budget)
        level += BLOCK
        _sort_level(
            kid_costs, kid_keys, kid_pairs,
            node_costs + level, node_parents + level, node_ranks + level, node_lexes + level,
            number, size, depth == 0, BLOCK, MINE, OTHERS,
        )  # fmt: skip
        depth += 1
        tl.debug_barrier()

    write_tree(
        root_tokens + b, token_ids, out_tokens, out_parents, out_depths, out_scores, counts + b,
        node_costs, node_parents, node_ranks, node_lexes, alive_costs, alive_nodes, places, new_indices, lex_paths,
        start, budget, ceiling, depth, width, LEVELS, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_columns", "num_sequences"])
def _rows_kernel(
    starts, counts, slots, context_lengths, token_ids, parents, depths, scores, row_slots, row_indices, positions,
    ancestor_mask, num_rows, num_columns, num_sequences,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Slots, positions and the ancestor mask of a few rows; padding is written whole."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    sequences = tl.arange(0, SEQUENCES)
    ends = tl.load(starts + 1 + sequences, mask=sequences < num_sequences, other=2147483647)
    sequence = tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), axis=1)
    owned = inside & (sequence < num_sequences)
    start = tl.load(starts + sequence, mask=owned, other=0)
    index = tl.where(owned, rows - start, 0)
    real = owned & (index < tl.load(counts + sequence, mask=owned, other=0))
    slot = tl.load(slots + sequence, mask=owned, other=-1)
    parent = tl.load(parents + rows, mask=real, other=-1)
    depth = tl.load(depths + rows, mask=real, other=0)
    context_length = tl.load(context_lengths + slot, mask=owned & (slot >= 0), other=0)
    padding = inside & ~real
    tl.store(token_ids + rows, tl.zeros([ROWS], tl.int64), mask=padding)
    tl.store(parents + rows, tl.full([ROWS], -1, tl.int32), mask=padding)
    tl.store(depths + rows, tl.zeros([ROWS], tl.int32), mask=padding)
    tl.store(scores + rows, tl.zeros([ROWS], tl.float32), mask=padding)
    tl.store(row_slots + rows, tl.where(real, slot, -1), mask=inside)
    tl.store(row_indices + rows, index, mask=inside)
    tl.store(positions + rows, context_length + depth, mask=inside)
    mask_rows = ancestor_mask + rows.to(tl.int64) * num_columns
    columns = tl.arange(0, COLUMNS)
    for first in range(0, num_columns, COLUMNS):
        column = first + columns
        zeros = tl.zeros([ROWS, COLUMNS], tl.uint8)
        tl.store(mask_rows[:, None] + column[None, :], zeros, mask=inside[:, None] & (column < num_columns)[None, :])
    tl.debug_barrier()
    ones = tl.full([ROWS], 1, tl.uint8)
    tl.store(mask_rows + index, ones, mask=owned & (index < num_columns))
    while tl.max(parent, axis=0) >= 0:
        tl.store(mask_rows + parent, ones, mask=parent >= 0)
        parent = tl.load(parents + start + parent, mask=parent >= 0, other=-1)


def build_ddtree_pooled_triton(
    root_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    budgets: torch.Tensor,
    num_depths: torch.Tensor,
    max_budget: int,
    slots: torch.Tensor,
    context_lengths: torch.Tensor,
    trees: TreeBuffers,
) -> None:
    """Same arguments as `build_ddtree_pooled`; fills `trees`."""
    num_sequences, depths, width = token_ids.shape
    num_pairs = len(trees.pairs.table)
    warps, mine, others = next(shape[1:] for shape in SHAPES if num_pairs <= shape[0])
    _grow_kernel[(num_sequences,)](
        root_tokens, token_ids, log_probs, budgets, num_depths,
        trees.starts, trees.counts, trees.token_ids, trees.parents, trees.depths, trees.scores,
        *trees.scratch, *trees.pairs, trees.num_rows, max_budget, depths, width,
        LEVELS=trees.max_depths + 1, BLOCK=trees.block, PAIRS=num_pairs, MINE=mine, OTHERS=others,
        BOUNDED=num_pairs >= BOUNDED_PAIRS, num_warps=warps,
    )  # fmt: skip
    write_rows(slots, context_lengths, trees)


def write_rows(slots: torch.Tensor, context_lengths: torch.Tensor, trees: TreeBuffers) -> None:
    """The rows' layout, once `trees` holds the nodes."""
    num_sequences = trees.num_sequences
    _rows_kernel[(triton.cdiv(trees.num_rows, ROW_TILE),)](
        trees.starts, trees.counts, slots, context_lengths, trees.token_ids, trees.parents, trees.depths, trees.scores,
        trees.row_slots, trees.row_indices, trees.positions, trees.ancestor_mask,
        trees.num_rows, trees.rows_each, num_sequences,
        # Few of each, for few binaries: what is masked away costs nothing here.
        ROWS=ROW_TILE, COLUMNS=min(1024, max(64, triton.next_power_of_2(trees.rows_each))),
        SEQUENCES=max(8, triton.next_power_of_2(num_sequences)), num_warps=4,
    )  # fmt: skip
