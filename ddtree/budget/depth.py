"""How deep to draft, where a drafter may fill fewer slots than its block has: what each depth lately brought.

Decided before the draft, so from the rounds before: per depth the probability mass and the number of the nodes bought there.
Depths that were not drafted are taken to go on as the last ones did, so that a draft can grow again.
"""

from __future__ import annotations

import numpy as np

MEMORY = 0.85
GROWTH = 3  # depths that a draft may exceed the last one by
LEAST_DEPTH = 2  # below it nothing is learnt about deeper ones
MOST_RATIO = 0.97  # of a depth's mass to the one's above it


class DepthProfile:
    """Running means per depth, starting as a geometric fall that sums to `tokens` and `nodes`."""

    def __init__(self, num_depths: int, tokens: float, nodes: float):
        ratio = geometric_ratio(tokens, num_depths)
        self.tokens = ratio ** np.arange(1, num_depths + 1)  # [D]
        self.nodes = self.tokens * (nodes / max(self.tokens.sum(), 1e-9))
        self.last = num_depths

    def copy(self) -> DepthProfile:
        twin = object.__new__(DepthProfile)
        twin.tokens, twin.nodes, twin.last = self.tokens.copy(), self.nodes.copy(), self.last
        return twin

    def best_depth(self, draft_s: np.ndarray, verify_s: np.ndarray, price: float) -> int:
        """The depth whose tokens are worth most above their time. `draft_s` by slots, `verify_s` by rows."""
        limit = min(len(self.tokens), self.last + GROWTH)
        rows = 1 + np.cumsum(self.nodes[:limit])
        verify = np.interp(rows, np.arange(len(verify_s)), verify_s)
        draft = draft_s[2 : limit + 2]  # the root takes a slot as well
        value = np.cumsum(self.tokens[:limit]) - price * (verify + draft)
        return max(int(np.argmax(value)) + 1, min(LEAST_DEPTH, limit))

    def observe(self, depths: np.ndarray, gains: np.ndarray, drafted: int) -> None:
        """Nodes bought in a round that drafted to depth `drafted`: their depths [n] and probabilities [n]."""
        tokens = np.bincount(depths, weights=gains, minlength=drafted + 1)[1 : drafted + 1]
        nodes = np.bincount(depths, minlength=drafted + 1)[1 : drafted + 1]
        self.tokens[:drafted] = MEMORY * self.tokens[:drafted] + (1 - MEMORY) * tokens
        self.nodes[:drafted] = MEMORY * self.nodes[:drafted] + (1 - MEMORY) * nodes
        self.last = drafted
        self._continue(self.tokens, drafted)
        self._continue(self.nodes, drafted)

    def _continue(self, values: np.ndarray, drafted: int) -> None:
        if drafted >= len(values):
            return
        before = values[drafted - 2] if drafted > 1 else 1.0
        ratio = min(values[drafted - 1] / before, MOST_RATIO) if before > 1e-9 else 0.0
        values[drafted:] = values[drafted - 1] * ratio ** np.arange(1, len(values) - drafted + 1)


def geometric_ratio(total: float, count: int) -> float:
    """r in [0, 1] with r + r^2 + ... + r^count = total, by bisection."""
    low, high = 0.0, 1.0
    powers = np.arange(1, count + 1)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle**powers).sum() < total else (low, middle)
    return high
