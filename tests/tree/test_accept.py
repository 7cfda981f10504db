"""The acceptance walk against following the target step by step."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree.tree.accept import accept
from ddtree.tree.build import build_ddtree, top_candidates
from ddtree.tree.draft_tree import DraftTree
from tests.tree.test_build import paths, random_log_probs


def by_prefix(tree: DraftTree, target) -> tuple[list[int], list[int]]:
    """Path and emitted tokens of a target that is a function of the prefix, without looking at parents."""
    node_of = {(): 0, **{path: node for node, path in enumerate(paths(tree), 1)}}
    prefix, nodes, emitted = (), [], []
    while prefix in node_of:
        nodes.append(node_of[prefix])
        emitted.append(target(prefix))
        prefix = (*prefix, emitted[-1])
    return nodes, emitted


@pytest.mark.parametrize("seed", range(40))
def test_walk_follows_the_target(seed):
    vocab_size = 3
    tree = build_ddtree(1, top_candidates(random_log_probs(seed, 6, vocab_size), 80), 80)

    def target(prefix):
        return (sum(prefix) * 7 + len(prefix) * seed + seed) % vocab_size

    target_tokens = np.array([target(path) for path in [(), *paths(tree)]])
    acceptance = accept(tree, target_tokens)
    nodes, emitted = by_prefix(tree, target)
    assert acceptance.path.tolist() == nodes
    assert acceptance.token_ids.tolist() == emitted
    assert acceptance.bonus_token == emitted[-1]
    assert acceptance.acceptance_length == len(acceptance.path) == len(acceptance.token_ids)
    assert acceptance.path.dtype == acceptance.token_ids.dtype == np.int64


def small_tree() -> DraftTree:
    """Root 9; children 0 and 5; below 0: 5 and 0; below that 0: 7."""
    return DraftTree(
        np.array([9, 0, 5, 5, 0, 7]),
        np.array([-1, 0, 0, 1, 1, 4], dtype=np.int32),
        np.array([0, 1, 1, 2, 2, 3], dtype=np.int32),
        -np.arange(6, dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("target_tokens", "path", "emitted"),
    [
        ([8, 0, 0, 0, 0, 0], [0], [8]),  # nothing drafted is right
        ([0, 0, 1, 1, 7, 3], [0, 1, 4, 5], [0, 0, 7, 3]),  # token 0 twice, down to a leaf
        ([5, 0, 0, 0, 0, 0], [0, 2], [5, 0]),  # 0 is a child elsewhere, not here
        ([0, 5, 1, 5, 7, 3], [0, 1, 3], [0, 5, 5]),  # the bonus equals the last token
        ([9, 0, 0, 0, 0, 0], [0], [9]),  # the bonus equals the root
    ],
)
def test_walk_on_a_tree_by_hand(target_tokens, path, emitted):
    acceptance = accept(small_tree(), np.array(target_tokens))
    assert acceptance.path.tolist() == path
    assert acceptance.token_ids.tolist() == emitted
    assert acceptance.bonus_token == emitted[-1]


def test_root_only_emits_the_bonus():
    acceptance = accept(DraftTree.root_only(3), np.array([0]))
    assert (acceptance.path.tolist(), acceptance.bonus_token, acceptance.token_ids.tolist()) == ([0], 0, [0])


def test_cut_keeps_the_first_emitted_tokens():
    acceptance = accept(small_tree(), np.array([0, 0, 1, 1, 7, 3]))
    for n in range(1, 5):
        kept = acceptance.cut(n)
        assert kept.path.tolist() == [0, 1, 4, 5][:n]
        assert kept.token_ids.tolist() == [0, 0, 7, 3][:n]
        assert kept.bonus_token == [0, 0, 7, 3][n - 1]
        assert kept.acceptance_length == n
    for n in (0, 5, -1):
        with pytest.raises(ValueError, match="1 to 4"):
            acceptance.cut(n)


def test_equal_siblings_are_our_own_fault():
    tree = DraftTree(np.array([9, 4, 4]), np.array([-1, 0, 0], dtype=np.int32), np.array([0, 1, 1]), np.zeros(3))
    with pytest.raises(AssertionError, match="siblings"):
        accept(tree, np.array([4, 0, 0]))
    with pytest.raises(AssertionError, match="one target token"):
        accept(tree, np.array([4, 0]))
