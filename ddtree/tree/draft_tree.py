"""The draft tree: candidate continuations of the root, verified in one target forward.

Letters: N nodes (root included), D depths below the root. Node 0 is the root; parents precede children.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROOT = 0


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Nodes in order of falling score, so every prefix of the arrays is itself a tree.

    The position of node i in its sequence is `context_length + depths[i]`, never its index.
    """

    token_ids: np.ndarray  # [N] int64; token_ids[0] is the root token
    parents: np.ndarray  # [N] int32; parents[0] == -1, parents[i] < i
    depths: np.ndarray  # [N] int32; root 0
    scores: np.ndarray  # [N] float32; sum of drafter log-probabilities from the root, root 0.0

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    @property
    def num_drafted(self) -> int:
        """Nodes that count against the tree budget: all but the root."""
        return self.num_nodes - 1

    @classmethod
    def root_only(cls, root_token: int) -> DraftTree:
        """The tree of plain decoding: budget 0."""
        return cls(
            token_ids=np.array([root_token], dtype=np.int64),
            parents=np.array([-1], dtype=np.int32),
            depths=np.zeros(1, dtype=np.int32),
            scores=np.zeros(1, dtype=np.float32),
        )

    def first(self, num_drafted: int) -> DraftTree:
        """The tree of the best `num_drafted` nodes: a prefix, since parents precede children."""
        end = num_drafted + 1
        return DraftTree(self.token_ids[:end], self.parents[:end], self.depths[:end], self.scores[:end])

    def take(self, nodes: np.ndarray) -> DraftTree:
        """The tree of these nodes alone, ascending, the root among them, each with its parent."""
        places = np.full(self.num_nodes, -1, dtype=np.int32)
        places[nodes] = np.arange(len(nodes))
        parents = np.where(self.parents[nodes] < 0, -1, places[self.parents[nodes]]).astype(np.int32)
        return DraftTree(self.token_ids[nodes], parents, self.depths[nodes], self.scores[nodes])

    def ancestor_mask(self) -> np.ndarray:
        """`[N, N]` bool: entry [i, j] is true when j is i or an ancestor of i; row sums are depth + 1."""
        mask = np.eye(self.num_nodes, dtype=bool)
        rows = list(mask)
        # One pass in node order, since a parent's row is done before its children's, at any depth.
        for row, parent in zip(rows[1:], self.parents[1:].tolist(), strict=True):
            np.logical_or(row, rows[parent], out=row)
        return mask

    def probabilities(self) -> np.ndarray:
        """`[N]` float64: each node's probability after its parent, by which the tree was built; the root's is 1."""
        scores = self.scores.astype(np.float64)
        steps = scores[1:] - scores[self.parents[1:]]
        return np.concatenate([[1.0], np.exp(np.minimum(steps, 0.0))])

    @property
    def is_chain(self) -> bool:
        """Every node but the last has one child."""
        return bool((self.parents == np.arange(-1, self.num_drafted)).all())

    def children(self, node: int) -> np.ndarray:
        """Indices of the node's children, best first."""
        return np.flatnonzero(self.parents == node)
