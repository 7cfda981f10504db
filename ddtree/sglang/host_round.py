"""A round's draft, build and accept on the host: for penalties and grammars, and for adapters that sum whole paths up.

B sequences, N nodes of each one's padded tree, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np
import torch

from ddtree.engine.decode_round import grow
from ddtree.engine.drafter import Drafter
from ddtree.engine.sequence import Sequence
from ddtree.engine.target import choose_tokens
from ddtree.sglang.nodes import Accepted, Nodes, accepted_of
from ddtree.sglang.trees import NO_NODE, pack
from ddtree.tree.accept import accept
from ddtree.tree.draft_tree import DraftTree

if TYPE_CHECKING:  # it imports SGLang
    from ddtree.sglang.target_face import TargetFace


class HostRound:
    """One round; each sequence's `drafter_state` is its `SlotContext`."""

    def __init__(self, drafter: Drafter, target: TargetFace, sequences: SequenceOf[Sequence], num_nodes: int) -> None:
        self.target, self.sequences, self.num_nodes = target, sequences, num_nodes
        self.candidates = drafter.draft(sequences)

    def finish(self) -> Nodes:
        """The first rank's trees of what was drafted."""
        trees = [grow(*each) for each in zip(self.sequences, self.candidates, strict=True)]
        self.trees = trees if self.target.group.world_size == 1 else self._agreed(trees)
        lengths = [sequence.context_length for sequence in self.sequences]
        return Nodes.of(pack(self.trees, lengths, self.num_nodes), self.target.device)

    def accept_logits(self, logits: torch.Tensor) -> Accepted:
        """Our own choice after each node, along its own path, and our own walk; `logits` [B * N, V]."""
        chosen = np.zeros((len(self.trees), self.num_nodes), dtype=np.int64)
        each_logits = logits.view(*chosen.shape, -1)
        for row, sequence, tree, rows in zip(chosen, self.sequences, self.trees, each_logits, strict=True):
            row[: tree.num_nodes] = choose_tokens(sequence, tree, rows[: tree.num_nodes], sequence.context_length + 1)
        chosen = self.target.agree(chosen)
        accepted = [accept(tree, row[: tree.num_nodes]) for tree, row in zip(self.trees, chosen, strict=True)]
        path, emitted = np.zeros((2, *chosen.shape), dtype=np.int64)
        for number, each in enumerate(accepted):
            path[number, : len(each.path)], emitted[number, : len(each.path)] = each.path, each.token_ids
        lengths = torch.tensor([each.acceptance_length for each in accepted], dtype=torch.int32)
        arrays = (torch.from_numpy(path), lengths, torch.from_numpy(emitted), torch.from_numpy(chosen).flatten())
        return accepted_of(*(array.to(self.target.device) for array in arrays), self.num_nodes)

    def parents(self) -> list[np.ndarray]:
        """Of each tree's nodes."""
        return [tree.parents for tree in self.trees]

    def _agreed(self, trees: list[DraftTree]) -> list[DraftTree]:
        shared = np.full((len(trees), 3, self.num_nodes), NO_NODE - 1, dtype=np.int64)
        for row, tree in zip(shared, trees, strict=True):
            row[:, : tree.num_nodes] = tree.token_ids, tree.parents, tree.depths
        return [_unpacked(row[:, row[2] >= 0]) for row in self.target.agree(shared)]


def _unpacked(columns: np.ndarray) -> DraftTree:
    """A tree from its token ids, parents and depths [3, N]; scores are not needed any more."""
    token_ids, parents, depths = columns
    zeros = np.zeros(len(token_ids), dtype=np.float32)
    return DraftTree(token_ids, parents.astype(np.int32), depths.astype(np.int32), zeros)
