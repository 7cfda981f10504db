"""The acceptance walk of many sequences against the single-sequence one: the twin, and the Triton kernel."""

import numpy as np
import pytest
import torch

from ddtree.kernels.tree_accept import accept_pooled, accept_pooled_reference
from ddtree.kernels.tree_build import TreeBuffers
from ddtree.tree.accept import accept
from ddtree.tree.draft_tree import DraftTree
from tests.kernels.trees import TREES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def walk_by(way: str):
    if way == "twin":
        return accept_pooled_reference
    pytest.importorskip("triton")
    from functools import partial

    from ddtree.kernels.tree_accept.triton import accept_pooled_triton

    return partial(accept_pooled_triton, max_rows=1025)


def random_tree(parents: torch.Tensor, seed: int) -> tuple[DraftTree, np.ndarray]:
    """Siblings with different tokens, 0 among them, and target tokens that children often carry."""
    rng = np.random.default_rng(seed)
    parents = parents.numpy().astype(np.int32)
    seen, depths = np.zeros(len(parents), dtype=np.int64), np.zeros(len(parents), dtype=np.int32)
    token_ids = np.zeros(len(parents), dtype=np.int64)
    target_tokens = rng.integers(0, 3, size=len(parents))
    for node in range(1, len(parents)):
        parent = parents[node]
        depths[node], token_ids[node] = depths[parent] + 1, seen[parent]
        seen[parent] += 1
        if rng.random() < 0.7:
            target_tokens[parent] = token_ids[node]
    return DraftTree(token_ids, parents, depths, np.zeros(len(parents), dtype=np.float32)), target_tokens


def packed(trees: list[DraftTree | None], targets: list[np.ndarray | None], room: int) -> tuple[torch.Tensor, ...]:
    """token_ids, parents, starts, counts, target tokens; `room` rows each, whatever is not a node holds what it may."""
    rows = len(trees) * room
    token_ids, target_tokens = (torch.zeros(rows, dtype=torch.int64) for _ in range(2))
    parents = torch.zeros(rows, dtype=torch.int32)  # as if children of the root, with the root's target token
    for b, (tree, target) in enumerate(zip(trees, targets, strict=True)):
        if tree is not None:
            place = slice(b * room, b * room + tree.num_nodes)
            token_ids[b * room : (b + 1) * room] = int(target[0])
            token_ids[place] = torch.from_numpy(tree.token_ids)
            parents[place] = torch.from_numpy(tree.parents)
            target_tokens[place] = torch.from_numpy(target)
    counts = torch.tensor([0 if tree is None else tree.num_nodes for tree in trees], dtype=torch.int32)
    starts = torch.arange(len(trees) + 1, dtype=torch.int32) * room
    return tuple(t.to(DEVICE) for t in (token_ids, parents, starts, counts, target_tokens))


def check_walks(way: str, names: list[str], path_rows: int) -> None:
    pairs = [random_tree(TREES[name], seed) for seed, name in enumerate(names)]
    trees, targets = [tree for tree, _ in pairs] + [None], [target for _, target in pairs] + [None]
    arrays = packed(trees, targets, max(tree.num_nodes for tree, _ in pairs) + 2)
    path, lengths, emitted, bonus_tokens = (t.cpu() for t in walk_by(way)(*arrays, path_rows))
    assert (path.dtype, lengths.dtype) == (torch.int32, torch.int32)
    assert (emitted.dtype, bonus_tokens.dtype) == (torch.int64, torch.int64)
    for b, (tree, target) in enumerate(pairs):
        expected = accept(tree, target)
        if expected.acceptance_length > path_rows:
            expected = expected.cut(path_rows)
        length = int(lengths[b])
        assert length == expected.acceptance_length
        assert path[b, :length].tolist() == expected.path.tolist()
        assert emitted[b, :length].tolist() == expected.token_ids.tolist()
        assert int(bonus_tokens[b]) == expected.bonus_token
        assert not path[b, length:].any() and not emitted[b, length:].any()
    assert int(lengths[-1]) == 0 and not path[-1].any() and not emitted[-1].any()


@pytest.mark.parametrize("path_rows", [1, 3, 66])
@pytest.mark.parametrize("way", ["twin", "triton"])
def test_every_sequence_walks_as_alone(way, path_rows):
    check_walks(way, ["one", "two", "star65", "chain65", "random17", "random65"], path_rows)


def test_a_chain_that_the_target_wrote_is_kept_whole():
    tokens = torch.tensor([0, 0, 7, 0, 3])
    trees = TreeBuffers(1, 4, DEVICE)
    trees.token_ids.copy_(tokens)
    trees.parents.copy_(torch.arange(-1, 4))
    trees.counts.fill_(5)
    target_tokens = torch.cat([tokens[1:], torch.tensor([0])]).to(DEVICE)
    path, lengths, emitted, bonus_tokens = accept_pooled(trees, target_tokens, 5)
    assert path.tolist() == [[0, 1, 2, 3, 4]] and lengths.tolist() == [5]
    assert emitted.tolist() == [[0, 7, 0, 3, 0]] and bonus_tokens.tolist() == [0]


def test_bad_input_is_named():
    trees = TreeBuffers(1, 4, DEVICE)
    with pytest.raises(ValueError, match="path_rows must be >= 1"):
        accept_pooled(trees, trees.token_ids, 0)
    with pytest.raises(ValueError, match=r"target_tokens must be \[5\] int64"):
        accept_pooled(trees, trees.token_ids[:3], 1)


@pytest.mark.gpu
@pytest.mark.parametrize("path_rows", [16, 302])
def test_true_shapes_on_the_device(path_rows):
    check_walks("triton", ["random1025", "deep1025", "chain300", "narrow257", "one"], path_rows)
