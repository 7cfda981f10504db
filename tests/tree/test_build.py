"""The builder against brute force, the paper's heap, and what the paper's own builder made of stored logits."""

from __future__ import annotations

import heapq
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from ddtree.tree.build import Candidates, Level, build_chain, build_ddtree, grow, top_candidates
from tests.closeness import assert_close

VECTORS = Path(__file__).resolve().parents[3] / "shared" / "vectors" / "ddtree_build.json"
BUDGETS = (0, 1, 2, 3, 7, 16, 64, 300, 1024)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(np.float32)


def random_log_probs(seed: int, depth: int, vocab_size: int) -> np.ndarray:
    return log_softmax(np.random.default_rng(seed).normal(size=(depth, vocab_size)) * 3)


def paths(tree) -> list[tuple[int, ...]]:
    """Token ids from the root's child to each drafted node, read off the parents alone."""
    found = [()]
    for node in range(1, tree.num_nodes):
        found.append((*found[tree.parents[node]], int(tree.token_ids[node])))
    return found[1:]


def brute_force(candidates: Candidates, budget: int) -> list[tuple[int, ...]]:
    """Every prefix, sorted."""
    depth, width = candidates.token_ids.shape
    prefixes = []
    for length in range(1, depth + 1):
        for ranks in itertools.product(range(width), repeat=length):
            score = 0.0
            for d, rank in enumerate(ranks):
                score += float(candidates.log_probs[d, rank])
            if score > -np.inf:
                prefixes.append((-score, ranks))
    return [tokens_of(candidates, ranks) for _, ranks in sorted(prefixes)[:budget]]


def heap_twin(candidates: Candidates, budget: int) -> list[tuple[int, ...]]:
    """The paper's builder: pop the best prefix, push its next sibling and its first child."""
    depth, width = candidates.token_ids.shape
    log_probs = candidates.log_probs.astype(np.float64)
    heap, found = [], []

    def push(parent_score: float, ranks: tuple[int, ...]) -> None:
        if len(ranks) <= depth and ranks[-1] < width and log_probs[len(ranks) - 1, ranks[-1]] > -np.inf:
            heapq.heappush(heap, (-(parent_score + log_probs[len(ranks) - 1, ranks[-1]]), ranks, parent_score))

    push(0.0, (0,))
    while heap and len(found) < budget:
        cost, ranks, parent_score = heapq.heappop(heap)
        found.append(tokens_of(candidates, ranks))
        push(parent_score, (*ranks[:-1], ranks[-1] + 1))
        push(-cost, (*ranks, 0))
    return found


def tokens_of(candidates: Candidates, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(candidates.token_ids[d, rank]) for d, rank in enumerate(ranks))


def check_invariants(tree, candidates: Candidates, budget: int) -> None:
    assert (tree.token_ids.dtype, tree.parents.dtype) == (np.int64, np.int32)
    assert (tree.depths.dtype, tree.scores.dtype) == (np.int32, np.float32)
    assert tree.parents[0] == -1 and tree.depths[0] == 0 and tree.scores[0] == 0
    assert tree.num_drafted <= budget
    nodes = np.arange(1, tree.num_nodes)
    parents = tree.parents[1:]
    assert ((parents >= 0) & (parents < nodes)).all()
    assert (tree.depths[1:] == tree.depths[parents] + 1).all()
    assert (np.diff(tree.scores) <= 0).all()
    assert len(set(paths(tree))) == tree.num_drafted
    ranking = [dict(zip(*row, strict=True)) for row in zip(candidates.token_ids, candidates.log_probs, strict=True)]
    expected = [sum(float(ranking[d][token]) for d, token in enumerate(path)) for path in paths(tree)]
    assert_close("scores", tree.scores[1:], expected, 1e-6)


@pytest.mark.parametrize("shape", [(1, 9), (3, 6), (5, 4)])
@pytest.mark.parametrize("seed", range(20))
def test_tree_holds_the_best_prefixes_in_order(shape, seed):
    log_probs = random_log_probs(seed, *shape)
    for budget in (0, 1, 3, 8, 40, 200):
        candidates = top_candidates(log_probs, budget)
        tree = build_ddtree(99, candidates, budget)
        assert tree.token_ids[0] == 99
        assert paths(tree) == brute_force(candidates, budget)
        assert tree.num_drafted == min(budget, sum(shape[1] ** d for d in range(1, shape[0] + 1)))
        check_invariants(tree, candidates, budget)


@pytest.mark.parametrize("case", range(8))
def test_tree_is_the_papers(case):
    if not VECTORS.exists():
        pytest.skip("shared/vectors/ddtree_build.json is not beside the repository")
    expected = json.loads(VECTORS.read_text("utf-8"))[case]
    budget = expected["budget"]
    log_probs = log_softmax(np.array(expected["logits"], dtype=np.float32))
    tree = build_ddtree(0, top_candidates(log_probs, budget), budget)
    assert tree.token_ids[1:].tolist() == expected["token_ids"]
    assert tree.depths[1:].tolist() == expected["depths"]
    assert tree.parents[1:].tolist() == expected["parents"]


@pytest.mark.parametrize("seed", range(6))
def test_tree_is_the_heaps_at_every_budget_and_a_prefix_of_the_next(seed):
    candidates = top_candidates(random_log_probs(seed, 15, 1200), 1024)
    longest = heap_twin(candidates, 1024)
    for budget in BUDGETS:
        tree = build_ddtree(0, candidates, budget)
        assert paths(tree) == longest[:budget]
        check_invariants(tree, candidates, budget)


@pytest.mark.parametrize("seed", range(20))
def test_ties_follow_the_rank_tuples(seed):
    rng = np.random.default_rng(seed)
    # Few distinct values, so that prefixes tie within and across depths; 0.0 ties a child with its parent.
    log_probs = -np.sort(rng.integers(0, 4, size=(4, 6)), axis=1).astype(np.float32) * np.float32(0.5)
    if seed % 2:
        log_probs[:, 0] = 0.0
    candidates = Candidates(np.tile(np.arange(6)[::-1], (4, 1)), log_probs)
    for budget in (1, 2, 5, 9, 30, 100, 2000):
        tree = build_ddtree(7, candidates, budget)
        assert paths(tree) == brute_force(candidates, budget) == heap_twin(candidates, budget)
        assert tree.parents[0] == -1 and tree.token_ids[0] == 7


def test_equal_scores_everywhere_grow_in_rank_order():
    log_probs = np.full((3, 40), np.float32(np.log(1 / 40)))
    candidates = top_candidates(log_probs, 100)
    assert candidates.token_ids[0].tolist() == list(range(40))
    assert paths(build_ddtree(0, candidates, 100)) == heap_twin(candidates, 100)


def test_excluded_tokens_never_enter():
    log_probs = np.array([[-0.5, -1.0, -np.inf, -np.inf], [-0.1, -np.inf, -np.inf, -np.inf]], dtype=np.float32)
    tree = build_ddtree(0, top_candidates(log_probs, 50), 50)
    assert paths(tree) == [(0,), (0, 0), (1,), (1, 0)]
    nothing = np.full((3, 4), -np.inf, dtype=np.float32)
    assert build_ddtree(5, top_candidates(nothing, 9), 9).token_ids.tolist() == [5]


def test_token_zero_is_a_token():
    log_probs = log_softmax(np.array([[5.0, 1.0], [5.0, 1.0], [5.0, 1.0]]))
    assert paths(build_ddtree(0, top_candidates(log_probs, 3), 3)) == [(0,), (0, 0), (0, 0, 0)]


@pytest.mark.parametrize("budget", [14, 15, 1024])
def test_budget_beyond_every_prefix_takes_them_all(budget):
    tree = build_ddtree(1, top_candidates(random_log_probs(0, 3, 2), budget), budget)
    assert tree.num_drafted == 14


def test_fewer_candidates_than_budget():
    candidates = top_candidates(random_log_probs(3, 6, 50), 4)
    assert candidates.token_ids.shape == (6, 4)
    assert paths(build_ddtree(0, candidates, 100)) == heap_twin(candidates, 100)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
def test_no_candidates_is_the_root(shape):
    candidates = Candidates(np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32))
    assert build_ddtree(3, candidates, 8).token_ids.tolist() == [3]


def test_budget_zero_is_the_root_and_negative_is_refused():
    candidates = top_candidates(random_log_probs(0, 2, 5), 3)
    tree = build_ddtree(3, candidates, 0)
    assert (tree.token_ids.tolist(), tree.parents.tolist(), tree.num_drafted) == ([3], [-1], 0)
    for build in (build_ddtree, build_chain):
        with pytest.raises(ValueError, match="tree budget must be >= 0, got -1"):
            build(3, candidates, -1)


def test_chain_is_the_best_token_of_each_depth():
    candidates = top_candidates(random_log_probs(1, 5, 30), 8)
    for length in (0, 1, 3, 5, 9):
        chain = build_chain(4, candidates, length)
        assert chain.token_ids.tolist() == [4, *candidates.token_ids[:length, 0]]
        assert chain.parents.tolist() == list(range(-1, min(length, 5)))
        check_invariants(chain, candidates, length)


def test_top_candidates_settles_ties_at_the_cut_by_token_id():
    row = np.array([-3.0, -1.0, -3.0, -1.0, -2.0, -3.0], dtype=np.float32)
    candidates = top_candidates(row[None], 4)
    assert candidates.token_ids.tolist() == [[1, 3, 4, 0]]
    assert candidates.log_probs.tolist() == [[-1.0, -1.0, -2.0, -3.0]]


def test_candidates_refuse_what_is_not_a_ranking():
    ids = np.zeros((1, 2), dtype=np.int64)
    for row in ([-2.0, -1.0], [0.5, -1.0], [np.nan, -1.0], [-1.0, np.nan]):
        with pytest.raises(ValueError, match="candidates: "):
            Candidates(ids, np.array([row], dtype=np.float32))
    with pytest.raises(ValueError, match="same"):
        Candidates(ids, np.zeros((1, 3), dtype=np.float32))
    with pytest.raises(ValueError, match="NaN"):
        top_candidates(np.full((1, 4), np.nan, dtype=np.float32), 2)


def test_scores_conditioned_on_the_parent_use_the_same_loop():
    """The seam: a bigram source, whose children's costs depend on the parent's token."""
    table = -random_log_probs(0, 5, 5).astype(np.float64)

    class Bigram:
        def children(self, depth, level, ceiling):
            if depth > 3:
                return None
            costs = (level.costs[:, None] + table[level.token_ids]).ravel()
            parents, tokens = np.divmod(np.arange(len(costs)), 5)
            level = Level(tokens, parents, tokens, costs)
            return level.take((costs <= ceiling).nonzero()[0])

    every = []
    for length in (1, 2, 3):
        for tokens in itertools.product(range(5), repeat=length):
            cost = sum(table[a, b] for a, b in zip((2, *tokens), tokens, strict=False))
            every.append((cost, tokens))
    for budget in (1, 6, 40, 155, 300):
        assert paths(grow(2, Bigram(), budget)) == [tokens for _, tokens in sorted(every)[:budget]]
