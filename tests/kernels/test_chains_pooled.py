"""Chains by the builder of trees, from the best token of each depth, or of each parent, alone: the twins and the Triton kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree.kernels.conditioning import PathScores
from ddtree.kernels.tree_build import (
    TreeBuffers,
    best_path_pooled,
    best_path_pooled_reference,
    build_ddtree_pooled,
)
from ddtree.tree.build import Candidates, build_chain
from ddtree.tree.conditioned import ConditionedCandidates
from tests.kernels import test_tree_build_conditioned as conditioned
from tests.kernels import test_tree_build_pooled as factorised
from tests.kernels.test_tree_build_pooled import DEVICE, check_sequence, ints, poisoned

DEPTHS, WIDTH = (15, 64) if DEVICE == "cuda" else (6, 9)  # the interpreter takes its time
LENGTHS = [DEPTHS, 4, -1, 0]  # of the sequences of a round; -1 has no rows
KINDS = pytest.mark.parametrize("kind", ["random", "coarse", "excluded"])


class Table:
    """One sequence's scores as a scorer of paths: [D, M, M], or three such tables."""

    def __init__(self, *tables: torch.Tensor) -> None:
        self.tables = [table.cpu().numpy() for table in tables]

    def along(self, ranks: np.ndarray) -> np.ndarray:
        depths, path = np.arange(len(ranks) + 1), np.array([0, 0, *ranks])
        grandparent, parents = path[:-1], path[1:]
        below_parent, *two = self.tables
        rows = below_parent[depths, parents]
        if two:
            rows = rows + two[0][depths, grandparent] - two[1][depths, grandparent, parents][:, None]
        return np.where(np.isnan(rows), -np.inf, np.minimum(rows, 0))


def path_by(way: str):
    if way == "twin":
        return best_path_pooled_reference
    pytest.importorskip("triton")
    from ddtree.kernels.tree_build.triton_chain import best_path_pooled_triton

    return best_path_pooled_triton


def check_chains(token_ids: torch.Tensor, log_probs: torch.Tensor, expected, build=build_ddtree_pooled) -> None:
    """`expected(b)`: what the host has to build a chain from."""
    count, depths, _ = token_ids.shape
    trees = poisoned(TreeBuffers(count, max(LENGTHS), DEVICE))
    rest = (ints(*LENGTHS), ints(*[depths] * count), max(LENGTHS), ints(*range(count)), ints(*[7] * count), trees)
    build(torch.arange(count, device=DEVICE), token_ids, log_probs, *rest)
    for b, length in enumerate(LENGTHS):
        chain = None if length < 0 else build_chain(b, expected(b), length)
        check_sequence(trees, b, chain, b, 7)
        assert chain is None or chain.is_chain


@pytest.mark.parametrize("kind", ["coarse", "excluded"])
@pytest.mark.parametrize("way", ["twin", "triton"])
def test_of_the_best_token_of_each_depth(way, kind):
    token_ids, log_probs = factorised.candidates(kind, len(LENGTHS), DEPTHS, WIDTH)
    best = token_ids[:, :, :1].contiguous(), log_probs[:, :, :1].contiguous()
    check_chains(*best, lambda b: Candidates(token_ids[b].cpu().numpy(), log_probs[b].cpu().numpy()), factorised.build_by(way))


@KINDS
@pytest.mark.parametrize("num_ancestors", [1, 2])
@pytest.mark.parametrize("way", ["twin", "triton"])
def test_of_the_best_child_of_each_node(way, num_ancestors, kind):
    token_ids, scores = conditioned.scores(kind, len(LENGTHS), DEPTHS, WIDTH)
    if num_ancestors == 2:
        _, grandparent = conditioned.scores("steep", len(LENGTHS), DEPTHS, WIDTH, seed=1)
        scores = PathScores(scores, grandparent, grandparent[..., 0].abs().unsqueeze(-1).expand_as(grandparent).contiguous() - 3.0)
    tables = scores if num_ancestors == 2 else (scores,)

    def host(b: int) -> ConditionedCandidates:
        return ConditionedCandidates(token_ids[b].cpu().numpy(), Table(*(table[b] for table in tables)))

    check_chains(*path_by(way)(token_ids, scores), host)


def test_scores_of_another_shape_are_named():
    token_ids, scores = conditioned.scores("random", 1, 3, 4)
    with pytest.raises(ValueError, match=r"scores must be \[1, 3, 4, 4\] torch.float32, got \[1, 3, 4, 3\]"):
        best_path_pooled(token_ids, scores[..., :3])
