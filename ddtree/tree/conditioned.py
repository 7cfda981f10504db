"""Candidates whose scores depend on the path before them (Weaver, arXiv 2607.06763), for the same best-first builder.

The candidates of a depth are the same tokens for every parent; what they are worth is not. So a level of the tree costs
one call of a scorer, for the level's own nodes, and best-first goes level by level (`grow`).

Letters: D depths below the root, M candidates per depth, n nodes of a level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np

from ddtree.tree.build import UNITS_PER_NAT, Candidates, Level

# (log_probs [n, M], depths [n] from 0) -> log_probs alike
Belief = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Scorer(Protocol):
    """Log-probabilities of a depth's candidates below each of some parents; [.., M] float32, at most 0, -inf excludes."""

    @property
    def marginals(self) -> np.ndarray:
        """`[D, M]`: the drafter's own, before any parent is known."""
        ...

    def children(self, depth: int, ranks: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """`[n, M]` at `depth` below the n nodes of depth - 1: `ranks` [n], their places among that depth's candidates (-1:
        the root); `parents` [n], their parents' places in the call before, which was for the depth above."""
        ...

    def along(self, ranks: np.ndarray) -> np.ndarray:
        """`[a, M]` at depths 1 ... a below the root and the path of candidates `ranks` [a - 1]."""
        ...


@dataclass(frozen=True, eq=False)
class ConditionedCandidates:
    """`token_ids` [D, M] int64 and the `scorer` that knows their parents; it takes the place of `Candidates`."""

    token_ids: np.ndarray
    scorer: Scorer
    belief: Belief | None = None
    scoring: ClassVar[str] = "conditioned"

    @property
    def num_depths(self) -> int:
        return len(self.token_ids)

    @property
    def marginals(self) -> np.ndarray:
        """`[D, M]`: what the drafter itself says of each depth's candidates, whatever their parents."""
        return self.scorer.marginals[: self.num_depths]

    def source(self, budget: int) -> ConditionedSource:
        """Where `grow` takes a tree's scores from."""
        return ConditionedSource(self)

    def first(self, num_depths: int) -> ConditionedCandidates:
        """The first depths alone."""
        return replace(self, token_ids=self.token_ids[:num_depths])

    def believed(self, belief: Belief) -> ConditionedCandidates:
        """The same candidates, every score replaced by what it has proved to mean."""
        return replace(self, belief=belief)

    def chain(self) -> Candidates:
        """The one-branch case: at each depth the best child of the last one."""
        ranks, log_probs = np.empty(0, np.int64), np.zeros((self.num_depths, 1), np.float32)
        for depth in range(self.num_depths):
            row = self.scorer.along(ranks)[-1]
            ranks = np.append(ranks, row.argmax())
            log_probs[depth] = row[ranks[-1]]
        return Candidates(np.take_along_axis(self.token_ids, ranks[:, None], axis=1), log_probs)

    def along(self, target_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What was said of the tokens that the target chose [a]: the scores [a', M] of each depth's candidates below the
        target's own path, best first, and the rank of the target's token, -1 where it was no candidate. It ends with the
        first such depth: below it nothing was said."""
        found = self.token_ids[: len(target_tokens)] == target_tokens[: self.num_depths, None]
        known = found.any(axis=1)
        count = len(known) if known.all() else int(known.argmin()) + 1
        places = found[:count].argmax(axis=1)
        log_probs = self.scorer.along(places[: count - 1]) if count else np.empty((0, self.token_ids.shape[1]), np.float32)
        order = (-log_probs).argsort(axis=1, kind="stable")
        hits = np.where(known[:count], (order == places[:, None]).argmax(axis=1), -1)
        return np.take_along_axis(log_probs, order, axis=1), hits


class ConditionedSource:
    """Scores that depend on each parent. A child's rank is its place among the depth's candidates."""

    def __init__(self, candidates: ConditionedCandidates) -> None:
        self.candidates = candidates

    def children(self, depth: int, level: Level, ceiling: float) -> Level | None:
        candidates = self.candidates
        if depth > candidates.num_depths or not candidates.token_ids.shape[1]:
            return None
        log_probs = candidates.scorer.children(depth, level.ranks, level.parents)
        if candidates.belief is not None:
            log_probs = candidates.belief(log_probs, np.full(len(log_probs), depth - 1))
        costs = level.costs[:, None] + np.rint(log_probs.astype(np.float64) * -UNITS_PER_NAT)
        parents, ranks = (costs <= ceiling).nonzero()
        return Level(candidates.token_ids[depth - 1][ranks], parents, ranks, costs[parents, ranks])
