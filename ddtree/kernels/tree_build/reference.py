"""The obvious twins: the paper's heap, one sequence at a time, and a stable sort of the whole vocabulary.

Nobody optimises them. The heap counts exactly, in Python integers of 2^-40 nats.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import torch

from ddtree.kernels.conditioning.weights import PathScores
from ddtree.kernels.tree_build.buffers import TreeBuffers

UNITS_PER_NAT = 2.0**40
DEAREST_NATS = 2.0**17  # what a log-probability counts at most


def build_ddtree_pooled_reference(
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
    """Same arguments as `build_ddtree_pooled`; fills `trees`."""
    starts = trees.starts.tolist()
    trees.counts.zero_()
    _clear(trees)
    for b, budget in enumerate(budgets.tolist()):
        start, end = starts[b], min(starts[b + 1], trees.num_rows)
        budget = min(budget, max_budget, end - start - 1)
        context_length = int(context_lengths[slots[b]])
        for row in range(start, end):
            trees.row_indices[row] = row - start
            trees.positions[row] = context_length
            trees.ancestor_mask[row, row - start] = 1
        if budget < 0:
            continue
        depths = min(int(num_depths[b]), token_ids.shape[1])
        if isinstance(log_probs, PathScores):
            nodes = _best_paths(_rows_of(log_probs, b), depths, budget)
        elif log_probs.ndim == 4:
            table = log_probs[b]
            nodes = _best_paths(lambda ranks, table=table: table[len(ranks), ranks[-1] if ranks else 0], depths, budget)
        else:
            nodes = _best_prefixes(_costs(log_probs[b, :depths]), budget)
        trees.counts[b] = len(nodes)
        places = {ranks: index for index, (_, ranks) in enumerate(nodes)}
        for index, (cost, ranks) in enumerate(nodes):
            row = start + index
            depth = len(ranks)
            trees.token_ids[row] = token_ids[b, depth - 1, ranks[-1]] if ranks else root_tokens[b]
            trees.parents[row] = places[ranks[:-1]] if ranks else -1
            trees.depths[row] = depth
            trees.scores[row] = 0.0 - cost / UNITS_PER_NAT
            trees.row_slots[row] = slots[b]
            trees.positions[row] = context_length + depth
            if ranks:
                trees.ancestor_mask[row] |= trees.ancestor_mask[start + places[ranks[:-1]]]


def _clear(trees: TreeBuffers) -> None:
    """Every row as padding."""
    for rows in (trees.token_ids, trees.depths, trees.scores, trees.row_indices, trees.positions, trees.ancestor_mask):
        rows.zero_()
    trees.parents.fill_(-1)
    trees.row_slots.fill_(-1)


def _costs(log_probs: torch.Tensor) -> list[list[int]]:
    """[D][m] of 2^-40 nats, each depth's up to its first excluded token."""
    costs = []
    for row in log_probs.tolist():
        kept = []
        for log_prob in row:
            if math.isnan(log_prob) or log_prob == -math.inf:
                break
            kept.append(_cost(log_prob))
        costs.append(kept)
    return costs


def _cost(log_prob: float) -> int:
    return round(min(-log_prob, DEAREST_NATS) * UNITS_PER_NAT)


def _rows_of(scores: PathScores, b: int) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """The scores [M] of the children of the path `ranks`, in the kernel's order of sums."""
    sequence = PathScores(*(table[b : b + 1] for table in scores))

    def row(ranks: tuple[int, ...]) -> torch.Tensor:
        grandparent, parent = (torch.tensor([r], device=sequence.norms.device) for r in (0, 0, *ranks)[-2:])
        return sequence.rows(len(ranks) + 1, grandparent, parent)[0, 0]

    return row


def _best_paths(row_below: Callable, num_depths: int, budget: int) -> list[tuple[int, tuple[int, ...]]]:
    """(cost, ranks) of the root and the best `budget` paths: pop the best, push all its children, `row_below(ranks)` [M]."""
    found, heap = [], [(0, ())]
    while heap and len(found) <= budget:
        cost, ranks = heapq.heappop(heap)
        found.append((cost, ranks))
        if len(ranks) < num_depths:
            for rank, log_prob in enumerate(row_below(ranks).tolist()):
                if log_prob > -math.inf:
                    heapq.heappush(heap, (cost + _cost(log_prob), (*ranks, rank)))
    return found


def _best_prefixes(costs: list[list[int]], budget: int) -> list[tuple[int, tuple[int, ...]]]:
    """(cost, ranks) of the root and the best `budget` prefixes: pop the best, push its next sibling and first child."""
    found, heap = [(0, ())], []

    def push(parent_cost: int, ranks: tuple[int, ...]) -> None:
        if len(ranks) <= len(costs) and ranks[-1] < len(costs[len(ranks) - 1]):
            heapq.heappush(heap, (parent_cost + costs[len(ranks) - 1][ranks[-1]], ranks, parent_cost))

    push(0, (0,))
    while heap and len(found) <= budget:
        cost, ranks, parent_cost = heapq.heappop(heap)
        found.append((cost, ranks))
        push(parent_cost, (*ranks[:-1], ranks[-1] + 1))
        push(cost, (*ranks, 0))
    return found


def top_candidates_reference(scores: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `num` of each row of `scores` [R, V]: ids [R, num] int64, log-probabilities [R, num] float32."""
    log_probs = normalised(scores)
    best = log_probs.sort(dim=-1, descending=True, stable=True)
    token_ids, log_probs = best.indices[:, :num], best.values[:, :num].contiguous()
    return token_ids.masked_fill(log_probs == -math.inf, 0), log_probs


def normalised(scores: torch.Tensor) -> torch.Tensor:
    """Log-softmax of each row in fp32; NaN counts as -inf, also in a row that has nothing else."""
    scores = scores.float()
    scores = scores.masked_fill(scores.isnan(), -math.inf)
    return scores.log_softmax(dim=-1).masked_fill_(scores == -math.inf, -math.inf)
