"""The acceptance walk: the longest path of a draft tree that the target itself would have written.

Following the child that carries the target's token is exact for any tree, greedy or sampled, because every emitted
token is the target's own choice after its own prefix (DDTree, arXiv 2604.12989). Letters: N nodes, n path nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddtree.tree.draft_tree import ROOT, DraftTree


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What one round keeps. `len(path) == len(token_ids)`: the committed root and the bonus token balance."""

    path: np.ndarray  # [n] int64; accepted nodes, root first: what commit(path) makes permanent
    bonus_token: int  # the target token after the last node: the last emitted, the next root
    token_ids: np.ndarray  # [n] int64; emitted this round: the accepted tokens, then the bonus token

    @property
    def acceptance_length(self) -> int:
        """Tokens emitted in the round, bonus included; 1 means that nothing drafted was accepted."""
        return len(self.path)

    def cut(self, n: int) -> Acceptance:
        """Keep the first n emitted tokens; the last of them becomes the bonus token.

        Raises ValueError unless 1 <= n <= acceptance_length.
        """
        if not 1 <= n <= self.acceptance_length:
            raise ValueError(f"cut must keep 1 to {self.acceptance_length} emitted tokens, got {n}")
        return Acceptance(self.path[:n], int(self.token_ids[n - 1]), self.token_ids[:n])


def accept(tree: DraftTree, target_tokens: np.ndarray) -> Acceptance:
    """Walk from the root along the children that carry `target_tokens [N]`, one target token per node."""
    target_tokens = np.asarray(target_tokens)
    assert target_tokens.shape == (tree.num_nodes,), "one target token per node"
    path, emitted = [ROOT], [int(target_tokens[ROOT])]
    while True:
        children = tree.children(path[-1])
        match = children[tree.token_ids[children] == emitted[-1]]
        if not len(match):
            break
        assert len(match) == 1, "siblings must carry different tokens"
        path.append(int(match[0]))
        emitted.append(int(target_tokens[path[-1]]))
    return Acceptance(np.array(path, dtype=np.int64), emitted[-1], np.array(emitted, dtype=np.int64))
