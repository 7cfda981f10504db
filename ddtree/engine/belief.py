"""What a request's trees promise at each budget of a ladder, and how far to believe it. N nodes of a tree."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from math import log2

import numpy as np

FADING = (0.5, 0.7, 0.9)  # of what a doubling of the budget brings, against the one before: least, where a tree tells nothing, most


@dataclass(eq=False)
class Belief:
    """What a request's trees promise at each budget of the ladder, and what came of it."""

    promised: list[float]  # accepted tokens, bonus excluded, by the trees' own scores
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
            self._tokens = [1 + min(trust * each, most) for each in self.promised]
        return self._tokens

    def promise(self, promised: list[float]) -> None:
        """Trees will be ranked another way."""
        self.promised, self._tokens = promised, None

    def learn(self, promised: list[float], accepted: float, expected: float, memory: float) -> None:
        """One tree more."""
        share = 1 - memory
        self.promise([old + share * (new - old) for old, new in zip(self.promised, promised, strict=True)])
        self.accepted = memory * self.accepted + share * accepted
        self.expected = memory * self.expected + share * expected


def promises(scores: SequenceOf[np.ndarray], ladder: SequenceOf[int]) -> list[tuple[list[float], float]]:
    """Accepted tokens that trees' scores ([N] each, the root's first) promise at each budget of the ladder, and for the tree as it is.

    Nodes come best first, so a smaller budget is a prefix. Beyond the tree each doubling brings a falling share of the last one:
    the share that the tree's own last doubling brought of the one before it.
    """
    padded = np.full((len(scores), max(map(len, scores))), -np.inf)
    for row, each in zip(padded, scores, strict=True):
        row[1 : len(each)] = each[1:]
    sums = np.exp(padded).cumsum(axis=1).tolist()
    return [_promised(row, len(each) - 1, ladder) for row, each in zip(sums, scores, strict=True)]


def _promised(sums: list[float], num: int, ladder: SequenceOf[int]) -> tuple[list[float], float]:
    """Of one tree of `num` nodes, by the promise of its first ones."""
    whole, half = sums[num], sums[num // 2]
    last, before = whole - half, half - sums[num // 4]
    least, usual, most = FADING
    fading = min(max(last / before, least), most) if num >= 4 and before > 0 else usual
    beyond = last * fading / (1 - fading)
    return [sums[each] if each <= num else whole + beyond * (1 - fading ** log2(each / num)) for each in ladder], whole
