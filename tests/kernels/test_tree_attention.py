"""tree_attention against its obvious twin, and what a row may and may not see."""

import numpy as np
import pytest
import torch

from ddtree.kernels.tree_attention import tree_attention, tree_attention_reference
from ddtree.tree.draft_tree import DraftTree
from tests.closeness import assert_close

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RATIO = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


def random_mask(num_nodes, seed):
    rng = np.random.default_rng(seed)
    parents = np.array([-1] + [rng.integers(0, node) for node in range(1, num_nodes)], dtype=np.int32)
    zeros = np.zeros(num_nodes)
    return torch.from_numpy(DraftTree(zeros, parents, zeros, zeros).ancestor_mask())


def inputs(num_rows, committed, num_heads, num_kv_heads, head_dim, dtype, device):
    shapes = [(num_rows, num_heads, head_dim)] + 2 * [(num_kv_heads, committed + num_rows, head_dim)]
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1, 64), (9, 3, 64), (8, 2, 60), (4, 4, 128)])
@pytest.mark.parametrize("num_rows, committed", [(1, 0), (1, 63), (2, 0), (17, 0), (17, 1), (33, 100)])
@pytest.mark.parametrize("tree", [True, False])
def test_equals_the_reference(num_rows, committed, heads, tree, dtype, device):
    query, keys, values = inputs(num_rows, committed, *heads, dtype, device)
    mask = random_mask(num_rows, seed=num_rows).to(device) if tree else None
    actual = tree_attention(query, keys, values, mask, 0.125)
    assert actual.dtype == dtype
    assert_close("attended", actual, tree_attention_reference(query, keys, values, mask, 0.125), RATIO[dtype])


def test_a_node_reads_its_ancestors_only(device):
    query, keys, values = inputs(12, 5, 4, 2, 16, torch.float32, device)
    mask = random_mask(12, seed=3).to(device)
    before = tree_attention(query, keys, values, mask, 0.25)
    for node in range(12):
        loud_keys, loud_values = keys.clone(), values.clone()
        loud_keys[:, 5 + node] *= 1000
        loud_values[:, 5 + node] *= 1000
        after = tree_attention(query, loud_keys, loud_values, mask, 0.25)
        unrelated = ~mask[:, node]
        assert torch.equal(after[unrelated], before[unrelated])
        assert not torch.equal(after[node], before[node])


def test_reads_slices_of_a_larger_buffer(device):
    query, keys, values = inputs(3, 8, 4, 2, 16, torch.float32, device)
    roomy = [torch.full((2, 64, 16), float("nan"), device=device) for _ in range(2)]
    for buffer, rows in zip(roomy, (keys, values), strict=True):
        buffer[:, :11] = rows
    mask = random_mask(3, seed=0).to(device)
    actual = tree_attention(query, roomy[0][:, :11], roomy[1][:, :11], mask, 0.25)
    assert_close("attended", actual, tree_attention(query, keys, values, mask, 0.25), 1e-6)
