"""The best-first tree in Triton where a score depends on the parent (and its parent): one program a sequence, level by level.

Rows of conditioned scores are in no order, so every child of a level counts: size * M of them, up to 65,536. Those within
the ceiling so far (soon few) are listed behind the best costs of the levels before; the list's budget-th least cost is the
new ceiling, found by bisection; what is above it goes. Lists lie in memory and are read a tile at a time, so that a level
costs what its children are, not what a level may hold. Of children that tie at the ceiling a level keeps the first by rank
tuple, so that it never holds more than the budget.

Costs as in `triton`; `_sort_level` and all after the levels are its.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.conditioning.weights import PathScores
from ddtree.kernels.tree_build.buffers import TreeBuffers
from ddtree.kernels.tree_build.triton import (
    NO_COST,
    RANK_BITS,
    _costs,
    _count,
    _sort_level,
    write_rows,
)
from ddtree.kernels.tree_build.triton_order import write_tree

# Children that a level may have -> warps, children read at once, and the tile in which nodes are counted (nodes, others).
SHAPES = ((1024, 4, 512, 32, 32), (4096, 4, 1024, 32, 32), (16384, 8, 2048, 64, 64), (65536, 16, 4096, 64, 64))


@triton.jit
def _list_children(log_probs, below_grandparent, norms, node_costs, node_ranks, node_parents, grandparent_ranks,
                   pool_costs, pool_pairs, seen, size, ceiling, width,
                   GRANDPARENTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """List the children, within the ceiling, of a level's `size` nodes; returns how many there are. `GRANDPARENTS`: scores
    are sums over a node and its parent, whose ranks are in `grandparent_ranks`."""
    number = tl.full([], 0, tl.int32)
    for first in range(0, size * WIDTH, TILE):
        entry = first + tl.arange(0, TILE)
        parent, candidate = entry // WIDTH, entry % WIDTH
        have = (parent < size) & (candidate < width)
        row = tl.load(node_ranks + parent, mask=have, other=0)
        log_prob = tl.load(log_probs + row * width + candidate, mask=have, other=float("-inf"))
        if GRANDPARENTS:
            grandparent = tl.load(grandparent_ranks + tl.load(node_parents + parent, mask=have, other=0), mask=have, other=0)
            log_prob += tl.load(below_grandparent + grandparent * width + candidate, mask=have, other=0.0)
            log_prob = tl.minimum(log_prob - tl.load(norms + grandparent * width + row, mask=have, other=0.0), 0.0)
        allowed = log_prob > float("-inf")
        cost = tl.load(node_costs + parent, mask=have, other=0) + _costs(tl.where(allowed, log_prob, 0.0))
        kept = have & allowed & (cost <= ceiling)
        place = seen + number + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(pool_costs + place, cost, mask=kept)
        tl.store(pool_pairs + place, (parent << 16) + candidate, mask=kept)
        number += _count(kept)
    return number


@triton.jit
def _dearest(costs, number, bound, TILE: tl.constexpr):
    """The greatest of a list's costs that is within the bound; -1 where none is."""
    greatest = tl.full([TILE], -1, tl.int64)
    for first in range(0, number, TILE):
        entry = first + tl.arange(0, TILE)
        cost = tl.load(costs + entry, mask=entry < number, other=NO_COST)
        greatest = tl.maximum(greatest, tl.where(cost <= bound, cost, -1))
    return tl.max(greatest, axis=0)


@triton.jit
def _listed_ceiling(costs, number, ceiling, budget, TILE: tl.constexpr):
    """The budget-th least cost of a list of at least so many, none above `ceiling`. Every round asks at three places."""
    low, high = tl.full([], -1, tl.int64), ceiling
    if ceiling == NO_COST - 1:
        high = _dearest(costs, number, ceiling, TILE)
    # Fewer than budget are <= low, at least budget are <= high: `count`, once it is known.
    count = number
    while (high - low > 1) & (count != budget):
        step = tl.maximum((high - low) >> 2, 1)
        third = tl.minimum(low + 3 * step, high)
        second = tl.minimum(low + 2 * step, high)
        within = tl.zeros([TILE], tl.int64)
        for first in range(0, number, TILE):
            entry = first + tl.arange(0, TILE)
            cost = tl.load(costs + entry, mask=entry < number, other=NO_COST)
            # Three counts below 2^20 in one sum.
            within += (cost <= low + step).to(tl.int64)
            within += ((cost <= second).to(tl.int64) << 20) + ((cost <= third).to(tl.int64) << 40)
        counts = tl.sum(within, axis=0)
        one, two = (counts & 0xFFFFF).to(tl.int32), ((counts >> 20) & 0xFFFFF).to(tl.int32)
        three = (counts >> 40).to(tl.int32)
        if one >= budget:
            high, count = low + step, one
        elif two >= budget:
            low, high, count = low + step, second, two
        elif three >= budget:
            low, high, count = second, third, three
        else:
            low = third
    return _dearest(costs, number, high, TILE)


@triton.jit
def _kids_within(costs, pairs, lexes, number, ceiling, key, TILE: tl.constexpr):
    """How many children are below the ceiling, or at it with a key of at most `key`."""
    kept = tl.zeros([TILE], tl.int32)
    for first in range(0, number, TILE):
        entry = first + tl.arange(0, TILE)
        cost = tl.load(costs + entry, mask=entry < number, other=NO_COST)
        tied = cost == ceiling
        pair = tl.load(pairs + entry, mask=tied, other=0)
        own = (tl.load(lexes + (pair >> 16), mask=tied, other=0) << RANK_BITS) + (pair & 0xFFFF)
        kept += ((cost < ceiling) | (tied & (own <= key))).to(tl.int32)
    return tl.sum(kept, axis=0)


@triton.jit
def _last_key(costs, pairs, lexes, number, ceiling, budget, TILE: tl.constexpr):
    """The key up to which a level keeps the children at the ceiling; keys differ, so `budget` are met exactly."""
    low, high = tl.full([], -1, tl.int32), tl.full([], 4194304, tl.int32)  # above every key
    if number > budget:
        count = _kids_within(costs, pairs, lexes, number, ceiling, high, TILE)
        while (high - low > 1) & (count > budget):
            middle = (low + high) >> 1
            within = _kids_within(costs, pairs, lexes, number, ceiling, middle, TILE)
            if within >= budget:
                high, count = middle, within
            else:
                low = middle
    return high


@triton.jit
def _cut_list(pool_costs, pool_pairs, lexes, kid_costs, kid_keys, kid_pairs, seen, number, ceiling, last_key, budget,
              TILE: tl.constexpr):  # fmt: skip
    """Keep of the list what is within the ceiling: costs in front, children apart; returns how many of each."""
    alive_number, kid_number = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, seen + number, TILE):
        entry = first + tl.arange(0, TILE)
        cost = tl.load(pool_costs + entry, mask=entry < seen + number, other=NO_COST)
        alive = cost <= ceiling
        kid = alive & (entry >= seen)
        pair = tl.load(pool_pairs + entry, mask=kid, other=0)
        key = (tl.load(lexes + (pair >> 16), mask=kid, other=0) << RANK_BITS) + (pair & 0xFFFF)
        kid = kid & ((cost < ceiling) | (key <= last_key))
        # Two running counts in one scan.
        scan = tl.cumsum(alive.to(tl.int32) + (kid.to(tl.int32) << 16), axis=0)
        place, kid_place = alive_number + (scan & 0xFFFF) - 1, kid_number + (scan >> 16) - 1
        tl.debug_barrier()  # what is written may be what another thread has yet to read
        tl.store(pool_costs + place, cost, mask=alive & (place < budget))
        tl.store(kid_costs + kid_place, cost, mask=kid)
        tl.store(kid_keys + kid_place, key, mask=kid)
        tl.store(kid_pairs + kid_place, pair, mask=kid)
        alive_number += _count(alive)
        kid_number += _count(kid)
    return tl.minimum(alive_number, budget), kid_number


@triton.jit
def _grow_conditioned_kernel(
    root_tokens, token_ids, log_probs, below_grandparent, norms, budgets, num_depths, starts, counts,
    out_tokens, out_parents, out_depths, out_scores,
    node_costs, node_parents, node_ranks, node_lexes, kid_costs, kid_keys, kid_pairs,
    alive_costs, alive_nodes, places, new_indices, lex_paths, pool_costs, pool_pairs,
    num_rows, max_budget, depths, width, num_kids, num_pool,
    GRANDPARENTS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr,
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
    kid_costs += b * num_kids
    kid_keys += b * num_kids
    kid_pairs += b * num_kids
    pool_costs += b * num_pool
    pool_pairs += b * num_pool
    token_ids += b * depths * width
    log_probs += b * depths * width * width
    below_grandparent += b * depths * width * width
    norms += b * depths * width * width
    start = tl.load(starts + b)
    room = tl.minimum(tl.load(starts + b + 1), num_rows) - start - 1
    budget = tl.minimum(tl.minimum(tl.load(budgets + b), max_budget), room)
    limit = tl.minimum(tl.load(num_depths + b), depths)

    tl.store(node_costs, 0)
    tl.store(node_ranks, 0)
    tl.store(node_parents, 0)
    tl.store(node_lexes, 0)
    seen = tl.full([], 0, tl.int32)
    ceiling = tl.full([], NO_COST - 1, tl.int64)
    size = tl.where(budget > 0, 1, 0)
    depth = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    while (depth < limit) & (size > 0):
        level = depth * BLOCK
        table = depth * width * width
        level_above = tl.maximum(level - BLOCK, 0)  # the root counts as its own parent
        number = _list_children(
            log_probs + table, below_grandparent + table, norms + table,
            node_costs + level, node_ranks + level, node_parents + level, node_ranks + level_above, pool_costs, pool_pairs, seen, size, ceiling, width, GRANDPARENTS, WIDTH, TILE,
        )  # fmt: skip
        tl.debug_barrier()
        if (number > 0) & (seen + number >= budget):
            ceiling = _listed_ceiling(pool_costs, seen + number, ceiling, budget, TILE)
        lexes = node_lexes + level
        last_key = _last_key(pool_costs + seen, pool_pairs + seen, lexes, number, ceiling, budget, TILE)
        seen, size = _cut_list(
            pool_costs, pool_pairs, lexes, kid_costs, kid_keys, kid_pairs,
            seen, number, ceiling, last_key, budget, TILE,
        )  # fmt: skip
        tl.debug_barrier()
        level += BLOCK
        _sort_level(
            kid_costs, kid_keys, kid_pairs,
            node_costs + level, node_parents + level, node_ranks + level, node_lexes + level,
            size, size, False, BLOCK, MINE, OTHERS,
        )  # fmt: skip
        depth += 1
        tl.debug_barrier()
    write_tree(
        root_tokens + b, token_ids, out_tokens, out_parents, out_depths, out_scores, counts + b,
        node_costs, node_parents, node_ranks, node_lexes, alive_costs, alive_nodes, places, new_indices, lex_paths,
        start, budget, ceiling, depth, width, LEVELS, BLOCK,
    )  # fmt: skip


def build_conditioned_pooled_triton(
    root_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor | PathScores,
    budgets: torch.Tensor,
    num_depths: torch.Tensor,
    max_budget: int,
    slots: torch.Tensor,
    context_lengths: torch.Tensor,
    trees: TreeBuffers,
) -> None:
    """Same arguments as `build_ddtree_pooled` with `log_probs` [B, D, M, M] or `PathScores`; fills `trees`."""
    num_sequences, depths, width = token_ids.shape
    block, row = trees.block, triton.next_power_of_2(width)
    warps, tile, mine, others = next(shape[1:] for shape in SHAPES if block * row <= shape[0])
    grandparents = isinstance(log_probs, PathScores)
    tables = log_probs if grandparents else (log_probs, log_probs, log_probs)
    _grow_conditioned_kernel[(num_sequences,)](
        root_tokens, token_ids, *tables, budgets, num_depths,
        trees.starts, trees.counts, trees.token_ids, trees.parents, trees.depths, trees.scores,
        *trees.scratch, *trees.pool,
        trees.num_rows, max_budget, depths, width, trees.scratch.kid_costs.shape[-1], trees.pool.costs.shape[-1],
        GRANDPARENTS=grandparents, LEVELS=trees.max_depths + 1, BLOCK=block, WIDTH=row,
        TILE=tile, MINE=mine, OTHERS=others, num_warps=warps,
    )  # fmt: skip
    write_rows(slots, context_lengths, trees)
