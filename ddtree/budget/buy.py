"""Which nodes are worth verifying: one market for all sequences of a round.

A node is worth the probability that its whole path is accepted (one more token then), and costs what one more row adds to
the forward. Nodes are taken by falling probability over all sequences, which is best-first within each (CaDDTree,
arXiv 2606.01813, for one sequence); of all prefixes of that order the best is kept, so the cost need not be convex.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def buy(
    gains: Sequence[np.ndarray],
    verify_s: np.ndarray,
    num_base_rows: int,
    price: float | None = None,
    rest_s: float = 0.0,
) -> list[int]:
    """How many nodes of each sequence's tree to keep, best first.

    Args:
        gains: per sequence [n_i], falling: each node's probability of acceptance.
        verify_s: seconds of a forward by its rows, at least up to `num_base_rows` and all nodes.
        num_base_rows: rows of the forward whatever is bought: roots, and trees of a pinned budget.
        price: tokens that a second is worth, the rate at which tokens are emitted in the long run. None maximises the
            round's own tokens per second instead, roots and `rest_s` counted.
        rest_s: of a round, beside the verify.
    """
    worth = gains[0] if len(gains) == 1 else np.concatenate(gains)
    # Stable, so that equal gains of a tree stay in their own order and every choice is a prefix of each.
    order = None if len(gains) == 1 else np.argsort(-worth, kind="stable")
    tokens = np.zeros(len(worth) + 1)
    np.cumsum(worth if order is None else worth[order], out=tokens[1:])
    seconds = verify_s[num_base_rows : num_base_rows + len(tokens)]
    value = (len(gains) + tokens) / (rest_s + seconds) if price is None else tokens - price * seconds
    best = int(value.argmax())
    if order is None:
        return [best]
    owners = np.repeat(np.arange(len(gains)), [len(each) for each in gains])
    return np.bincount(owners[order[:best]], minlength=len(gains)).tolist()
