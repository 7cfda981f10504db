"""Trees whose scores know the path: against brute force over every path, at every budget."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ddtree.tree.build import UNITS_PER_NAT, Candidates, build_chain, build_ddtree
from ddtree.tree.conditioned import ConditionedCandidates
from tests.tree.test_build import log_softmax, paths

BUDGETS = (0, 1, 2, 3, 7, 16, 64, 300, 1024)


class TableScorer:
    """Scores that were computed for every pair of candidates: `log_probs` [D, M, M], [k, p, c] of candidate c at depth
    k + 1 below candidate p at depth k; at depth 1 the row of p = 0 is the root's."""

    def __init__(self, log_probs: np.ndarray) -> None:
        self.log_probs = log_probs

    def children(self, depth: int, ranks: np.ndarray, parents: np.ndarray) -> np.ndarray:
        return self.log_probs[depth - 1, np.maximum(ranks, 0)]

    def along(self, ranks: np.ndarray) -> np.ndarray:
        return self.log_probs[np.arange(len(ranks) + 1), np.append(0, ranks)]

def random_candidates(seed: int, depths: int, width: int, *, coarse: bool = False, excluded: float = 0.0) -> ConditionedCandidates:
    """Token 0 is among the candidates; `coarse` scores tie often; a share of them may be -inf."""
    rng = np.random.default_rng(seed)
    table = log_softmax(rng.normal(size=(depths, width, width)) * 2)
    if coarse:
        table = (np.round(table * 2) / 2).astype(np.float32)
    table[rng.random(table.shape) < excluded] = -np.inf
    token_ids = np.stack([rng.permutation(width + 3)[:width] for _ in range(depths)])
    token_ids[0, 0] = 0
    return ConditionedCandidates(token_ids, TableScorer(table))


def brute_force(candidates: ConditionedCandidates, budget: int) -> list[tuple[int, ...]]:
    """Every path, by rising cost, ties by ranks."""
    table, found = candidates.scorer.log_probs, []
    depths, width = candidates.token_ids.shape
    for length in range(1, depths + 1):
        for ranks in itertools.product(range(width), repeat=length):
            scores = [float(table[k, ranks[k - 1] if k else 0, rank]) for k, rank in enumerate(ranks)]
            if min(scores) > -np.inf:
                found.append((sum(round(-score * UNITS_PER_NAT) for score in scores), ranks))
    return [tuple(int(candidates.token_ids[k, rank]) for k, rank in enumerate(ranks)) for _, ranks in sorted(found)[:budget]]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("coarse, excluded", [(False, 0.0), (True, 0.0), (True, 0.4)])
@pytest.mark.parametrize("depths, width", [(1, 5), (3, 4), (5, 3), (4, 1)])
def test_the_tree_is_the_best_of_all_paths(budget, coarse, excluded, depths, width):
    for seed in range(3):
        candidates = random_candidates(seed, depths, width, coarse=coarse, excluded=excluded)
        tree = build_ddtree(9, candidates, budget)
        assert paths(tree) == brute_force(candidates, budget)
        assert (tree.parents[1:] < np.arange(1, tree.num_nodes)).all() and (np.diff(tree.scores) <= 0).all()
        assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()


def test_rows_that_do_not_know_their_parent_give_the_factorised_tree():
    log_probs = np.sort(log_softmax(np.random.default_rng(3).normal(size=(5, 12)) * 3))[:, ::-1].copy()
    token_ids = np.random.default_rng(4).permutation(60).reshape(5, 12)
    table = np.broadcast_to(log_probs[:, None], (5, 12, 12))
    for budget in BUDGETS:
        factorised = build_ddtree(1, Candidates(token_ids, log_probs), budget)
        conditioned = build_ddtree(1, ConditionedCandidates(token_ids, TableScorer(table)), budget)
        assert paths(conditioned) == paths(factorised)
        assert (conditioned.scores == factorised.scores).all()


def test_a_chain_follows_the_best_child_of_its_own_last_token():
    candidates = random_candidates(5, 6, 8)
    table, rank, expected = candidates.scorer.log_probs, 0, []
    for depth in range(6):
        rank = int(table[depth, rank].argmax())
        expected.append(int(candidates.token_ids[depth, rank]))
    chain = build_chain(2, candidates, 4)
    assert chain.token_ids.tolist() == [2, *expected[:4]]
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3]


def test_what_was_said_of_the_targets_own_tokens():
    candidates = random_candidates(6, 5, 7)
    table, ids = candidates.scorer.log_probs, candidates.token_ids
    tokens = np.array([ids[0, 3], ids[1, 5], 99, ids[3, 0]])
    log_probs, hits = candidates.along(tokens)
    assert len(log_probs) == len(hits) == 3 and hits[2] == -1
    for depth, (parent, rank) in enumerate([(0, 3), (3, 5), (5, None)]):
        row = table[depth, parent]
        assert (log_probs[depth] == np.sort(row)[::-1]).all()
        if rank is not None:
            assert log_probs[depth, hits[depth]] == row[rank]
    assert len(candidates.first(2).along(tokens)[0]) == 2
    assert len(candidates.along(np.empty(0, np.int64))[0]) == 0


def test_belief_replaces_the_scores_by_depth():
    candidates = random_candidates(7, 4, 6)
    table = candidates.scorer.log_probs
    seen = []

    def belief(log_probs, depths):
        seen.extend(depths.tolist())
        return log_probs * (1 + depths[:, None])

    believed = build_ddtree(1, candidates.believed(belief), 40)
    scaled = ConditionedCandidates(candidates.token_ids, TableScorer(table * np.arange(1, 5)[:, None, None]))
    assert paths(believed) == paths(build_ddtree(1, scaled, 40))
    assert set(seen) == {0, 1, 2, 3}
