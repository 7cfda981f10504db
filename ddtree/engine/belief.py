"""What a request's trees promise at each budget of a ladder, and how far to believe it. L budgets, H trees heard, N nodes."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from ddtree.tree.draft_tree import DraftTree

FADING = (0.5, 0.7, 0.9)  # of what a doubling of the budget brings, against the one before: least, where a tree tells nothing, most


@dataclass(eq=False)
class Belief:
    """What a request's trees promise at each budget of the ladder, and what came of it."""

    promised: np.ndarray  # accepted tokens, bonus excluded, by the trees' own scores; replaced, never written into
    accepted: float  # means over recent rounds: accepted tokens,
    expected: float  # and what was promised of them
    num_plain: int = 0  # plain rounds since the last tree
    room: int | None = None  # nodes that memory and the forward have room for; None: no limit
    wanted: int = 0  # most nodes that may be asked for
    _tokens: list[float] | None = field(default=None, init=False, repr=False)  # until something is learnt

    @property
    def trust(self) -> float:
        """Accepted over promised."""
        return self.accepted / max(self.expected, 1e-6)

    def tokens(self, block_size: int) -> list[float]:
        """Tokens a round emits at each budget, bonus included."""
        if self._tokens is None:
            trust, most = self.trust, block_size - 1
            self._tokens = [1 + min(trust * each, most) for each in self.promised.tolist()]
        return self._tokens

    def promise(self, promised: np.ndarray) -> None:
        """Trees will be ranked another way."""
        self.promised, self._tokens = promised, None

    def learn(self, promised: np.ndarray, accepted: float, expected: float, memory: float) -> None:
        self.promise(self.promised + (1 - memory) * (promised - self.promised))
        self.accepted = memory * self.accepted + (1 - memory) * accepted
        self.expected = memory * self.expected + (1 - memory) * expected


def promises(trees: SequenceOf[DraftTree], ladder: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Accepted tokens that the scores of trees promise at each budget of the ladder [H, L], and for the trees as they are [H].

    Nodes come best first, so a smaller budget is a prefix. Beyond the tree each doubling brings a falling share of the last one:
    the share that the tree's own last doubling brought of the one before it.
    """
    num = np.array([tree.num_drafted for tree in trees])
    scores = np.full((len(trees), 1 + num.max()), -np.inf)
    for row, tree in zip(scores, trees, strict=True):
        row[1 : tree.num_nodes] = tree.scores[1:]
    sums, rows = np.exp(scores).cumsum(axis=1), np.arange(len(trees))
    whole, half = sums[rows, num], sums[rows, num // 2]
    last, before = whole - half, half - sums[rows, num // 4]
    least, usual, most = FADING
    told = (num >= 4) & (before > 0)
    fading = np.where(told, np.clip(last / np.where(told, before, 1.0), least, most), usual)[:, None]
    doublings = np.log2(np.maximum(np.maximum(ladder, 1) / num[:, None], 1.0))
    within = np.take_along_axis(sums, np.minimum(ladder, num[:, None]), axis=1)
    return within + last[:, None] * fading * (1 - fading**doublings) / (1 - fading), whole.tolist()
