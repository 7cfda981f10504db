"""The last step of a build in Triton: the order of all nodes across levels, and the tree's rows.

Every level is sorted by (cost, lex) already, lex being a node's place among its level's by its tuple of ranks. So a node's
place is its index in its level plus, for each other level, how many of that level come before it: a binary search.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place_all(sources, number, depth, BLOCK: tl.constexpr, LEVELS: tl.constexpr, TIES: tl.constexpr):
    """Places of the `number` nodes among all levels; returns how many meet their own cost in another level.

    Without TIES, nodes of equal cost in other levels count as later. With them, the listed paths decide.
    """
    node_costs, alive_costs, alive_nodes = sources[0], sources[3], sources[4]
    places, lex_paths = sources[5], sources[6]
    crossing = tl.full([], 0, tl.int32)
    for first in range(0, number, BLOCK):
        mine = first + tl.arange(0, BLOCK)
        cost = tl.load(alive_costs + mine, mask=mine < number, other=0)
        node = tl.load(alive_nodes + mine, mask=mine < number, other=BLOCK)
        place = node % BLOCK
        for level in range(1, depth + 1):
            elsewhere = (mine < number) & (node // BLOCK != level)
            before, tied = _count_before(elsewhere, node, cost, level, node_costs, lex_paths, BLOCK, LEVELS, TIES)
            place += tl.where(elsewhere, before, 0)
            crossing += tl.sum((elsewhere & tied).to(tl.int32), axis=0)
        tl.store(places + mine, place, mask=mine < number)
    return crossing


@triton.jit
def _count_before(mine, node, cost, level, node_costs, lex_paths,
                  BLOCK: tl.constexpr, LEVELS: tl.constexpr, TIES: tl.constexpr):  # fmt: skip
    """How many nodes of `level` come before each of `mine`, nodes of other levels; whether the next one costs the same."""
    costs = node_costs + level * BLOCK
    # Tuples of ranks are compared at the shallower level; there a prefix comes first.
    shared = tl.minimum(node // BLOCK, level)
    lex = (node // BLOCK > level).to(tl.int32)
    if TIES:
        lex += tl.load(lex_paths + node * LEVELS + shared, mask=mine, other=0).to(tl.int32)
    paths = lex_paths + level * (BLOCK * LEVELS) + shared
    position = tl.zeros([BLOCK], tl.int32)
    step = tl.full([], BLOCK, tl.int32)
    while step > 0:
        step = step // 2
        probe = position + tl.maximum(step, 1) - 1  # the last one: at the place that is left
        other = tl.load(costs + probe, mask=mine, other=0)
        before = other < cost
        if TIES:
            tied = mine & (other == cost)
            before |= tied & (tl.load(paths + probe * LEVELS, mask=tied, other=0).to(tl.int32) < lex)
        position += tl.where(before, tl.maximum(step, 1), 0)
    there = mine & (position < BLOCK)
    return position, there & (tl.load(costs + position, mask=there, other=0) == cost)


@triton.jit
def _list_paths(sources, number, depth, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """Write, for each node and each level on its path, the lex of its ancestor there."""
    node_parents, node_lexes, alive_nodes, lex_paths = sources[1], sources[2], sources[4], sources[6]
    for first in range(0, number, BLOCK):
        mine = first + tl.arange(0, BLOCK)
        own = tl.load(alive_nodes + mine, mask=mine < number, other=0)
        node = own
        for _ in range(depth):
            level = node // BLOCK
            climbing = (mine < number) & (level > 0)
            lex = tl.load(node_lexes + node, mask=climbing, other=0)
            tl.store(lex_paths + own * LEVELS + level, lex.to(tl.int16), mask=climbing)
            node = tl.where(climbing, (level - 1) * BLOCK + tl.load(node_parents + node, mask=climbing, other=0), node)


@triton.jit
def write_tree(
    root_token, token_ids, out_tokens, out_parents, out_depths, out_scores, out_count,
    node_costs, node_parents, node_ranks, node_lexes, alive_costs, alive_nodes, places, new_indices, lex_paths,
    start, budget, ceiling, depth, width,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `budget` best of the nodes of levels 1 to `depth`, best first, as rows from `start` on; the root before them."""
    # Each level's nodes within the last ceiling are its first ones.
    number = tl.full([], 0, tl.int32)
    nodes = tl.arange(0, BLOCK)
    for alive_level in range(1, depth + 1):
        cost = tl.load(node_costs + alive_level * BLOCK + nodes)
        alive = cost <= ceiling
        tl.store(alive_costs + number + nodes, cost, mask=alive)
        tl.store(alive_nodes + number + nodes, alive_level * BLOCK + nodes, mask=alive)
        number += tl.sum(alive.to(tl.int32), axis=0)
    tl.debug_barrier()
    sources = (node_costs, node_parents, node_lexes, alive_costs, alive_nodes, places, lex_paths)
    if _place_all(sources, number, depth, BLOCK, LEVELS, False) > 0:
        _list_paths(sources, number, depth, BLOCK, LEVELS)
        tl.debug_barrier()
        _place_all(sources, number, depth, BLOCK, LEVELS, True)
    tl.debug_barrier()
    for first in range(0, number, BLOCK):
        mine = first + nodes
        place = tl.load(places + mine, mask=mine < number, other=0)
        kept = (mine < number) & (place < budget)
        node = tl.load(alive_nodes + mine, mask=kept, other=BLOCK)
        row = start + 1 + place
        node_depth = node // BLOCK
        tl.store(new_indices + node, place + 1, mask=kept)
        place_of_token = (node_depth - 1) * width + tl.load(node_ranks + node, mask=kept, other=0)
        token = tl.load(token_ids + place_of_token, mask=kept, other=0)
        tl.store(out_tokens + row, token, mask=kept)
        tl.store(out_depths + row, node_depth, mask=kept)
        cost = tl.load(alive_costs + mine, mask=kept, other=0)
        tl.store(out_scores + row, (0.0 - cost.to(tl.float64) * (2.0**-40)).to(tl.float32), mask=kept)
    tl.debug_barrier()
    for first in range(0, number, BLOCK):
        mine = first + nodes
        place = tl.load(places + mine, mask=mine < number, other=0)
        kept = (mine < number) & (place < budget)
        node = tl.load(alive_nodes + mine, mask=kept, other=BLOCK)
        above = (node // BLOCK - 1) * BLOCK + tl.load(node_parents + node, mask=kept, other=0)
        index = tl.load(new_indices + above, mask=kept & (above >= BLOCK), other=0)
        tl.store(out_parents + start + 1 + place, index, mask=kept)
    if budget >= 0:
        tl.store(out_tokens + start, tl.load(root_token))
        tl.store(out_parents + start, -1)
        tl.store(out_depths + start, 0)
        tl.store(out_scores + start, 0.0)
    tl.store(out_count, tl.where(budget >= 0, 1 + tl.minimum(number, budget), 0))
