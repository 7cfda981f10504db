"""Best-first draft trees from a drafter's scores, after DDTree (arXiv 2604.12989).

Under factorised marginals the score of a prefix is the sum of one log-probability per depth. `build_ddtree` finds
the `budget` best prefixes in the order in which the paper's heap pops them: score falling, ties by the tuple of
ranks in lexicographic order, a prefix before its extensions. It goes level by level, so that a source whose scores
depend on the parent fits the same loop (`ScoreSource`; `tree.conditioned`).

Costs are negated scores counted in units of 2^-40 nats: fp32 log-probabilities beyond 8e-6 in magnitude are whole
numbers of them, so fp64 sums are exact down to a score of -8192 and equal scores are ties, not roundings.

Letters: D depths below the root, M candidates per depth, V vocabulary, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from ddtree.tree.draft_tree import DraftTree

UNITS_PER_NAT = 2.0**40
# The largest finite float: as a ceiling it lets every cost in except the +inf of an excluded token.
NO_CEILING = np.finfo(np.float64).max


@dataclass(frozen=True, eq=False)
class Candidates:
    """The drafter's ranking at each depth: `token_ids [D, M]` int64, `log_probs [D, M]` float32, rows best first.

    A log-probability of -inf marks a token that the ranking excludes; it never enters a tree. Raises ValueError
    when the shapes differ, a row is not best first, or a value is NaN or above 0.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    scoring: ClassVar[str] = "factorised"

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.log_probs.shape:
            raise ValueError(
                f"candidates: token_ids {self.token_ids.shape} and log_probs {self.log_probs.shape} "
                "must be the same [depths, candidates]"
            )
        if not (self.log_probs[:, :1] <= 0).all():
            raise ValueError("candidates: log_probs must be <= 0 and not NaN; normalise the scores first")
        if not (self.log_probs[:, 1:] <= self.log_probs[:, :-1]).all():
            raise ValueError("candidates: every row must be best first and without NaN; sort by falling log_probs")

    @property
    def num_depths(self) -> int:
        return self.token_ids.shape[0]

    @property
    def marginals(self) -> np.ndarray:
        """`[D, M]`: what the drafter itself says of each depth's candidates."""
        return self.log_probs

    def source(self, budget: int) -> FactorisedSource:
        """Where `grow` takes a tree's scores from."""
        return FactorisedSource(self, budget)

    def first(self, num_depths: int) -> Candidates:
        """The first depths alone."""
        return Candidates(self.token_ids[:num_depths], self.log_probs[:num_depths])

    def believed(self, belief: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Candidates:
        """The same candidates, their scores replaced by what they have proved to mean: `belief(log_probs, depths from 0)`."""
        return Candidates(self.token_ids, belief(self.log_probs, np.arange(self.num_depths)))

    def chain(self) -> Candidates:
        """The one-branch case: the best token of each depth."""
        return Candidates(self.token_ids[:, :1], self.log_probs[:, :1])

    def along(self, target_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What was said of the tokens that the target chose [a]: the scores [min(a, D), M] of each depth's candidates, and
        the rank of the target's token, -1 where it was no candidate."""
        count = min(len(target_tokens), self.num_depths)
        found = self.token_ids[:count] == target_tokens[:count, None]
        return self.log_probs[:count], np.where(found.any(axis=1), found.argmax(axis=1), -1)


class Level(NamedTuple):
    """Nodes of one depth, n of them. `parents` index the previous level's nodes."""

    token_ids: np.ndarray  # [n] int64
    parents: np.ndarray  # [n] int64
    ranks: np.ndarray  # [n] int64; place among the parent's children
    costs: np.ndarray  # [n] float64; the negated score in units of 2^-40 nats

    def take(self, nodes: np.ndarray) -> Level:
        return Level(self.token_ids[nodes], self.parents[nodes], self.ranks[nodes], self.costs[nodes])


class ScoreSource(Protocol):
    """Where scores come from: factorised marginals, or scores conditioned on each parent."""

    def children(self, depth: int, level: Level, ceiling: float) -> Level | None:
        """The children, at `depth`, of a best-first level, in any order; None below the last depth.

        Must hold every child of cost <= `ceiling` that can be among the best of the budget, and none above it.
        """
        ...


def top_candidates(log_probs: np.ndarray, budget: int) -> Candidates:
    """The best min(budget, V) tokens of each row of `log_probs [D, V]`, ties to the lowest token id.

    Raises ValueError for a negative budget or a NaN.
    """
    _check_budget(budget)
    log_probs = np.asarray(log_probs, dtype=np.float32)
    vocab_size = log_probs.shape[1]
    width = min(budget, vocab_size)
    token_ids = np.empty((len(log_probs), width), dtype=np.int64)
    for row, best in zip(log_probs, token_ids, strict=True):
        if width == 0:
            break
        # argpartition alone would choose freely among tokens that tie at the cut.
        cut = np.partition(row, vocab_size - width)[vocab_size - width]
        above = np.flatnonzero(row > cut)
        kept = np.concatenate([above, np.flatnonzero(row == cut)[: width - len(above)]])
        if len(kept) != width:
            raise ValueError("log_probs: expected numbers, got NaN")
        best[:] = kept[np.argsort(-row[kept], kind="stable")]
    return Candidates(token_ids, np.take_along_axis(log_probs, token_ids, axis=1))


def build_ddtree(root_token: int, candidates: Candidates, budget: int) -> DraftTree:
    """The tree of the `budget` best prefixes below `root_token`, best first; fewer where fewer exist.

    Raises ValueError for a negative budget.
    """
    _check_budget(budget)
    if budget == 0:
        return DraftTree.root_only(root_token)
    return grow(root_token, candidates.source(budget), budget)


def build_chain(root_token: int, candidates: Candidates, length: int) -> DraftTree:
    """The one-branch case, `length` deep."""
    _check_budget(length)
    return build_ddtree(root_token, candidates.first(length).chain(), length)


class FactorisedSource:
    """One ranking per depth, whatever the parent: the marginals of a block drafter."""

    def __init__(self, candidates: Candidates, budget: int) -> None:
        width = min(budget, candidates.token_ids.shape[1])
        self.token_ids = candidates.token_ids[:, :width]
        self.costs = np.rint(candidates.log_probs[:, :width].astype(np.float64) * -UNITS_PER_NAT)
        self.parents, self.ranks, self.ends = _hyperbola(budget, width)

    def children(self, depth: int, level: Level, ceiling: float) -> Level | None:
        if depth > len(self.costs) or not self.costs.shape[1]:
            return None
        costs = self.costs[depth - 1]
        # Rows whose best child is too dear have no cheaper one.
        num_rows = min(level.costs.searchsorted(ceiling - costs[0], side="right"), len(self.ends) - 1)
        end = self.ends[num_rows]
        parents, ranks = self.parents[:end], self.ranks[:end]
        child_costs = level.costs[parents] + costs[ranks]
        kept = (child_costs <= ceiling).nonzero()[0]
        ranks = ranks[kept]
        return Level(self.token_ids[depth - 1][ranks], parents[kept], ranks, child_costs[kept])


@lru_cache(maxsize=32)
def _hyperbola(budget: int, width: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """The pairs (i, r), row by row, with (i + 1) * (r + 1) <= budget, and where each row ends.

    Child r of the i-th best parent is preceded by the children r' <= r of all parents i' <= i, so no other pair can
    be among the `budget` best: O(budget log budget) pairs instead of budget * width.
    """
    row_lengths = np.minimum(budget // np.arange(1, budget + 1), width)
    ends = np.concatenate([[0], np.cumsum(row_lengths)])
    parents = np.repeat(np.arange(budget), row_lengths)
    ranks = np.arange(ends[-1]) - ends[parents]
    parents.flags.writeable = ranks.flags.writeable = False
    return parents, ranks, ends.tolist()


def grow(root_token: int, source: ScoreSource, budget: int) -> DraftTree:
    """Best-first tree of at most `budget` >= 1 drafted nodes from any score source, level by level.

    Each level keeps what is among the budget best of all nodes so far; only that can have descendants in the tree.
    """
    root = Level(np.array([root_token]), np.array([-1]), np.array([-1]), np.zeros(1))
    levels = [root]
    ceiling, best = NO_CEILING, np.empty(0)
    while True:
        level = source.children(len(levels), levels[-1], ceiling)
        if level is None or not len(level.costs):
            break
        best = np.concatenate([best, level.costs])
        if len(best) >= budget:
            best.partition(budget - 1)
            best = best[:budget]
            ceiling = best[-1]
            # Ties with the ceiling stay: they are settled when all nodes are known.
            if len(level.costs) > budget:
                level = level.take((level.costs <= ceiling).nonzero()[0])
        order = _best_first(level.costs, [*levels, level], [len(levels)])
        levels.append(level.take(order[: level.costs[order].searchsorted(ceiling, side="right")]))
    return _assemble(levels, budget)


def _best_first(costs: np.ndarray, levels: list[Level], depths: list[int]) -> np.ndarray:
    """Order of the nodes of `levels[depths]`, concatenated: rising cost, ties by rank tuple."""
    order = costs.argsort(kind="stable")
    ordered = costs[order]
    if (ordered[1:] != ordered[:-1]).all():
        return order
    # A rank of -1 past a node's own depth puts a prefix before its extensions.
    paths = [_rank_paths(levels, depth, depths[-1]) for depth in depths]
    return np.lexsort([*np.concatenate(paths, axis=1)[::-1], costs])


def _rank_paths(levels: list[Level], depth: int, length: int) -> np.ndarray:
    """`[length, n]`: the ranks from the root to each node of a level, first rank first, then -1."""
    ranks = np.full((length, len(levels[depth].costs)), -1)
    nodes = np.arange(ranks.shape[1])
    for d in range(depth, 0, -1):
        ranks[d - 1] = levels[d].ranks[nodes]
        nodes = levels[d].parents[nodes]
    return ranks


def _assemble(levels: list[Level], budget: int) -> DraftTree:
    """The best `budget` drafted nodes of all levels, renumbered best first, parents before children."""
    sizes = [len(level.costs) for level in levels]
    starts = np.cumsum([0, *sizes])
    costs = np.concatenate([level.costs for level in levels])
    parents = np.concatenate([level.parents + start for level, start in zip(levels, [0, *starts], strict=False)])
    order = _best_first(costs, levels, list(range(len(levels))))[: budget + 1]
    new_index = np.empty(len(costs) + 1, dtype=np.int32)
    new_index[order] = np.arange(len(order), dtype=np.int32)
    new_index[-1] = -1  # the root's parent, also when read as index -1
    return DraftTree(
        token_ids=np.concatenate([level.token_ids for level in levels])[order],
        parents=new_index[parents[order]],
        depths=np.repeat(np.arange(len(levels), dtype=np.int32), sizes)[order],
        scores=(0.0 - costs[order] / UNITS_PER_NAT).astype(np.float32),
    )


def _check_budget(budget: int) -> None:
    if budget < 0:
        raise ValueError(f"tree budget must be >= 0, got {budget}")
