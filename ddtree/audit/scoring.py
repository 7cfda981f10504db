"""Is a tree ranked by what its candidates are worth? A wrong score is lossless: only acceptance shows it.

Scores that know their path are computed a second time, path by path (`audit.adapter_twin`), and every tree's own scores and shape
are held against them. Letters: D depths, M candidates per depth, n path nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ddtree.audit.findings import DRAFTER, Fault
from ddtree.audit.tree_rows import path_to

SUMS_NATS = 1e-4  # float32 sums of one path's scores, in whatever order: 2^-24 of up to 1,000 nats
MOST_PATHS = 6  # looked at per round, the deepest first and the others as they come

# (tokens of a path, the root first) -> [n, M] log-probabilities of the candidates below each of them, and how many nats those of
# the tree may be away: [n, M] or 0 where they are the very same
Rows = Callable[[list[int]], tuple[np.ndarray, np.ndarray | float]]


def score_faults(tree, budget: int, token_ids: np.ndarray, rows: Rows, scoring: str) -> Iterator[Fault]:
    """Every node of some paths scores its parent's score and its own row's; no child that is worth more than the tree's least is
    left out, and none at all where the tree has fewer nodes than its `budget`.

    `token_ids` [D, M]: the candidates that `rows` are of. `scoring`: whose scores they are.
    """
    children = {(int(parent), int(token)): node for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True)) if node}
    least = float(tree.scores.min()) if tree.num_drafted >= budget else -np.inf
    for leaf in _some_leaves(tree):
        path = path_to(leaf, tree.parents)
        found, limits = rows([int(tree.token_ids[node]) for node in path])
        limits = np.broadcast_to(limits, found.shape) + SUMS_NATS
        for depth, (row, limits_here) in enumerate(zip(found, limits, strict=True)):
            parent = path[depth]
            due = tree.scores[parent] + row
            for token, score, limit in zip(token_ids[depth].tolist(), due.tolist(), limits_here.tolist(), strict=True):
                node = children.get((parent, token))
                if node is None and score > least + limit:
                    beside = f"the tree's least node {least:.3f}" if np.isfinite(least) else f"the tree has {tree.num_drafted} of {budget} nodes"
                    where = f"token {token} at depth {depth + 1} below node {parent} scores {score:.3f}, {beside}"
                    yield Fault(DRAFTER, f"draft tree: {where}, and is left out: it is not the best-first tree")
                    return
                if node is not None and not abs(score - float(tree.scores[node])) <= limit:
                    where = f"node {node} (token {token}, depth {depth + 1}, below node {parent}) scores {float(tree.scores[node]):.3f}"
                    yield Fault(DRAFTER, f"draft tree: {where}; by {scoring} it is {score:.3f}")
                    return


def _some_leaves(tree) -> list[int]:
    inner = set(tree.parents[1:].tolist())
    leaves = [node for node in range(tree.num_nodes) if node not in inner]
    deepest = sorted(leaves, key=lambda node: -tree.depths[node])[: MOST_PATHS // 2]
    return list(dict.fromkeys([*deepest, *leaves]))[:MOST_PATHS]
