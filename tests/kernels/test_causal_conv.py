"""The short convolution over each row's own ancestors against one row and one tap at a time."""

import pytest
import torch

from ddtree.kernels.causal_conv import (
    causal_conv_commit,
    causal_conv_commit_reference,
    causal_conv_prefill,
    causal_conv_prefill_reference,
    causal_conv_tree,
    causal_conv_tree_reference,
)
from tests.kernels.trees import TREES, ancestor_mask, leaf_paths, vector_cases, worst_error

EXACT = 1e-12
CLOSE = 1e-5
CHANNELS = 6


def inputs(num_rows: int, width: int = 4, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, weight, bias and the committed state."""
    shapes = ((num_rows, CHANNELS), (CHANNELS, width), (CHANNELS,), (width - 1, CHANNELS))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tree", [*TREES, "consecutive"])
def test_tree_equals_the_twin(tree, width, with_bias):
    parents = TREES.get(tree)
    x, weight, bias, state = inputs(65 if parents is None else len(parents), width)
    bias = bias if with_bias else None
    expected = causal_conv_tree_reference(x, weight, bias, state, parents)
    assert worst_error(causal_conv_tree(x, weight, bias, state, parents), expected) <= EXACT
    single = [None if t is None else t.float() for t in (x, weight, bias, state)]
    assert worst_error(causal_conv_tree(*single, parents), expected) <= CLOSE


@pytest.mark.parametrize("tree", ["one", "two", "random17", "chain65"])
def test_a_path_is_what_prefill_makes_of_its_tokens(tree):
    parents = TREES[tree]
    x, weight, bias, state = inputs(len(parents))
    out = causal_conv_tree(x, weight, bias, state, parents)
    for path in leaf_paths(parents):
        expected, after = causal_conv_prefill(x[path], weight, bias, state)
        assert worst_error(out[path], expected) <= EXACT
        assert torch.equal(causal_conv_commit(x, state, path), after)
        assert torch.equal(causal_conv_commit_reference(x, state, path), after)


def test_an_empty_path_leaves_the_state():
    x, _, _, state = inputs(3)
    assert torch.equal(causal_conv_commit(x, state, torch.empty(0, dtype=torch.int64)), state)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 130, 300])
def test_prefill_in_any_two_pieces_is_the_same(length):
    x, weight, bias, state = inputs(length)
    expected, expected_state = causal_conv_prefill_reference(x, weight, bias, state)
    out, after = causal_conv_prefill(x, weight, bias, state)
    assert worst_error(out, expected) <= EXACT
    assert torch.equal(after, expected_state)
    for cut in {1, 2, 3, 63, 64, 65, length - 1} & set(range(1, length)):
        first, between = causal_conv_prefill(x[:cut], weight, bias, state)
        second, last = causal_conv_prefill(x[cut:], weight, bias, between)
        assert worst_error(torch.cat((first, second)), out) <= EXACT
        assert torch.equal(last, expected_state)


@pytest.mark.parametrize("factor", [1e3, float("nan")])
@pytest.mark.parametrize("node", [1, 7, 40, 63])
@pytest.mark.parametrize("tree", ["star65", "random65"])
def test_a_row_moves_nothing_outside_its_subtree_by_a_bit(tree, node, factor):
    parents = TREES[tree]
    outside = ~ancestor_mask(parents)[:, node]
    x, weight, bias, state = inputs(65, dtype=torch.float32)
    changed = x.clone()
    changed[node] *= factor
    before = causal_conv_tree(x, weight, bias, state, parents)
    after = causal_conv_tree(changed, weight, bias, state, parents)
    assert not torch.equal(after[node], before[node])
    assert torch.equal(after[outside], before[outside])
    for path in leaf_paths(parents):
        if node not in path:
            assert torch.equal(causal_conv_commit(changed, state, path), causal_conv_commit(x, state, path))


def test_bfloat16_is_computed_in_fp32():
    given = inputs(17, dtype=torch.bfloat16)
    out = causal_conv_tree(*given, TREES["random17"])
    expected = causal_conv_tree(*(tensor.float() for tensor in given), TREES["random17"])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())


def test_reading_the_flattened_tree_as_consecutive_tokens_is_wrong():
    """The negative control: what a plain cache does must not pass for the tree."""
    given = inputs(65)
    expected = causal_conv_tree(*given, TREES["random65"])
    flattened = causal_conv_tree(*given, None)
    assert torch.linalg.vector_norm(flattened - expected) > 0.1 * torch.linalg.vector_norm(expected)


def test_values_from_outside_the_package():
    for case in vector_cases("causal_conv_tree.npz"):
        x, weight, state, path = (case[name] for name in ("x", "weight", "state", "path"))
        parents = case["parents"].long()
        for run in (causal_conv_tree, causal_conv_tree_reference):
            assert worst_error(run(x, weight, None, state, parents), case["out"]) <= EXACT
        assert torch.equal(causal_conv_commit(x, state, path), case["state_after"])
