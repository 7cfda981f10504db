"""The ancestor mask and the shape of a tree, on trees that the builder did not make."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree.tree.draft_tree import DraftTree


def random_tree(rng: np.random.Generator, num_nodes: int, reach: int = 10**9, vocab_size: int = 10**6) -> DraftTree:
    """Random parents, each at most `reach` nodes back; siblings carry different tokens."""
    parents = np.array([-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, num_nodes))], dtype=np.int32)
    depths = np.zeros(num_nodes, dtype=np.int32)
    for node in range(1, num_nodes):
        depths[node] = depths[parents[node]] + 1
    token_ids = rng.permutation(vocab_size)[:num_nodes].astype(np.int64)
    return DraftTree(token_ids, parents, depths, -np.arange(num_nodes, dtype=np.float32))


def naive_mask(tree: DraftTree) -> np.ndarray:
    mask = np.zeros((tree.num_nodes, tree.num_nodes), dtype=bool)
    for node in range(tree.num_nodes):
        ancestor = node
        while ancestor >= 0:
            mask[node, ancestor] = True
            ancestor = tree.parents[ancestor]
    return mask


@pytest.mark.parametrize(("num_nodes", "reach"), [(1, 1), (2, 1), (17, 1), (65, 5), (65, 1000), (300, 3), (300, 1000)])
def test_ancestor_mask_is_the_walk_to_the_root(num_nodes, reach):
    tree = random_tree(np.random.default_rng(num_nodes + reach), num_nodes, reach)
    mask = tree.ancestor_mask()
    assert mask.dtype == bool
    assert (mask == naive_mask(tree)).all()
    assert (mask.sum(axis=1) == tree.depths + 1).all()
    assert mask.diagonal().all() and mask[:, 0].all() and not np.triu(mask, 1).any()


def test_every_prefix_of_the_arrays_is_a_tree():
    tree = random_tree(np.random.default_rng(0), 60)
    mask = tree.ancestor_mask()
    for n in range(1, 61):
        prefix = DraftTree(tree.token_ids[:n], tree.parents[:n], tree.depths[:n], tree.scores[:n])
        assert (prefix.ancestor_mask() == mask[:n, :n]).all()


def test_children_are_in_node_order():
    tree = random_tree(np.random.default_rng(1), 50)
    for node in range(50):
        assert tree.children(node).tolist() == [i for i in range(50) if tree.parents[i] == node]
