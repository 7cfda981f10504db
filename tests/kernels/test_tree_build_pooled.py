"""Trees of many sequences at once against the single-sequence builder: the twin, and the Triton kernel."""

import numpy as np
import pytest
import torch

from ddtree.kernels.tree_build import TreeBuffers, build_ddtree_pooled, build_ddtree_pooled_reference
from ddtree.tree.build import Candidates, build_ddtree
from ddtree.tree.draft_tree import DraftTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NODE_ROWS = ("token_ids", "parents", "depths", "scores")
EVERY_ROW = (*NODE_ROWS, "row_slots", "row_indices", "positions", "ancestor_mask", "counts")


def build_by(way: str):
    if way == "twin":
        return build_ddtree_pooled_reference
    pytest.importorskip("triton")
    from ddtree.kernels.tree_build.triton import build_ddtree_pooled_triton

    return build_ddtree_pooled_triton


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def candidates(kind: str, sequences: int, depths: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, 0 among them, and log-probabilities [B, D, M], rows best first."""
    rng = np.random.default_rng(seed)
    shape = (sequences, depths, width)
    log_probs = torch.from_numpy(rng.normal(size=shape) * 3).float().log_softmax(dim=-1)
    if kind == "coarse":  # prefixes tie within and across depths
        log_probs = -torch.from_numpy(rng.integers(0, 4, size=shape)).float() / 2
    if kind == "certain":  # every best child ties with its parent
        log_probs[..., 0] = 0
    if kind == "equal":
        log_probs[:] = -0.25
    if kind == "tiny":  # below a unit of 2^-40 nats: rounded, half to even
        log_probs *= 2.0**-41
    log_probs = log_probs.sort(dim=-1, descending=True).values
    if kind == "excluded":
        log_probs[..., width // 3 :] = -torch.inf
        log_probs[:, 1:, 1:] = -torch.inf
    ids = np.stack([rng.permutation(width) for _ in range(sequences * depths)]).reshape(shape)
    return torch.from_numpy(ids).to(DEVICE), log_probs.to(DEVICE)


def poisoned(trees: TreeBuffers) -> TreeBuffers:
    """Left over from some other round."""
    for name in EVERY_ROW:
        getattr(trees, name).fill_(torch.nan if name == "scores" else 77)
    return trees


def check_sequence(trees: TreeBuffers, b: int, expected: DraftTree | None, slot: int, context_length: int) -> None:
    """Rows of sequence b are the tree's nodes, then padding."""
    start, end = trees.starts[b : b + 2].tolist()
    count = 0 if expected is None else expected.num_nodes
    assert int(trees.counts[b]) == count
    rows = slice(start, start + count)
    if expected is not None:
        for name in NODE_ROWS:
            np.testing.assert_array_equal(getattr(trees, name)[rows].cpu().numpy(), getattr(expected, name), name)
        mask = trees.ancestor_mask[rows].cpu().numpy()
        np.testing.assert_array_equal(mask[:, :count].astype(bool), expected.ancestor_mask())
        assert not mask[:, count:].any()
        assert (trees.row_slots[rows] == slot).all()
        assert (trees.positions[rows].cpu().numpy() == context_length + expected.depths).all()
    assert trees.row_indices[start:end].tolist() == list(range(end - start))
    check_padding(trees, slice(start + count, end))
    alone = trees.ancestor_mask[start + count : end].cpu()
    assert torch.equal(alone.sum(dim=1), torch.ones(len(alone), dtype=torch.int64))
    assert alone[torch.arange(len(alone)), torch.arange(count, end - start)].all()


def check_padding(trees: TreeBuffers, rows: slice) -> None:
    assert (trees.row_slots[rows] == -1).all() and (trees.parents[rows] == -1).all()
    for name in ("token_ids", "depths", "scores"):
        assert (getattr(trees, name)[rows] == 0).all(), name


def expected_tree(root: int, token_ids: torch.Tensor, log_probs: torch.Tensor, depths: int, budget: int) -> DraftTree:
    ranked = Candidates(token_ids[:depths].cpu().numpy(), log_probs[:depths].cpu().numpy())
    return build_ddtree(root, ranked, budget)


def check_build(way: str, kind: str, depths: int, width: int, max_budget: int, budgets: list[int]) -> None:
    count = len(budgets)
    token_ids, log_probs = candidates(kind, count, depths, width)
    num_depths = [max(0, depths - b) for b in range(count)]
    for b, kept in enumerate(num_depths):
        log_probs[b, kept:] = torch.nan
    roots, slots = list(range(count)), list(range(count, 0, -1))
    context_lengths = [0, *(100 + slot for slot in range(count))]
    trees = poisoned(TreeBuffers(count, max_budget, DEVICE))
    rest = (ints(*budgets), ints(*num_depths), max_budget, ints(*slots), ints(*context_lengths), trees)
    build_by(way)(torch.tensor(roots, device=DEVICE), token_ids, log_probs, *rest)
    for b, budget in enumerate(budgets):
        expected = None
        if budget >= 0:
            expected = expected_tree(
                roots[b], token_ids[b], log_probs[b], num_depths[b], min(budget, max_budget)
            )
        check_sequence(trees, b, expected, slots[b], context_lengths[slots[b]])


@pytest.mark.parametrize("kind", ["random", "coarse", "certain", "equal", "tiny", "excluded"])
@pytest.mark.parametrize("way", ["twin", "triton"])
def test_every_sequence_gets_the_builders_tree(way, kind):
    check_build(way, kind, depths=4, width=12, max_budget=12, budgets=[12, 7])


@pytest.mark.parametrize("way", ["twin", "triton"])
@pytest.mark.parametrize(
    ("depths", "width", "max_budget", "budgets"),
    [
        (1, 5, 5, [5, 0]),  # no depth at all for the second
        (31, 2, 6, [6]),
        (3, 2, 40, [40, 99]),  # fewer prefixes than the budget; one asked for more than there is room
        (2, 6, 1, [1, 0]),
        (3, 4, 0, [0]),
    ],
)
def test_awkward_sizes(way, depths, width, max_budget, budgets):
    check_build(way, "random", depths, width, max_budget, budgets)


@pytest.mark.parametrize("kind", ["random", "certain", "equal", "tiny"])
def test_a_first_ceiling_cuts_no_node_of_the_tree(kind, monkeypatch):
    """Large trees bound their levels before the first; here small ones do too, one with fewer candidates than its budget."""
    triton_build = pytest.importorskip("ddtree.kernels.tree_build.triton")
    monkeypatch.setattr(triton_build, "BOUNDED_PAIRS", 0)
    check_build("triton", kind, depths=4, width=60, max_budget=64, budgets=[60, 20, 64, 0])


@pytest.mark.parametrize("way", ["twin", "triton"])
def test_rows_lie_where_the_starts_say(way):
    token_ids, log_probs = candidates("random", 3, 3, 8)
    trees = poisoned(TreeBuffers(3, 8, DEVICE, num_rows=20))
    trees.starts.copy_(ints(0, 6, 6, 15))  # the second has no rows; the last five are nobody's
    rest = (ints(5, -1, 8), ints(3, 3, 3), 8, ints(2, -1, 0), ints(10, 20, 30), trees)
    build_by(way)(torch.zeros(3, dtype=torch.int64, device=DEVICE), token_ids, log_probs, *rest)
    for b, budget in ((0, 5), (2, 8)):
        slot = [2, -1, 0][b]
        expected = expected_tree(0, token_ids[b], log_probs[b], 3, budget)
        check_sequence(trees, b, expected, slot, [10, 20, 30][slot])
    check_sequence(trees, 1, None, -1, 0)
    check_padding(trees, slice(15, 20))
    for name in ("row_indices", "positions", "ancestor_mask"):
        assert not getattr(trees, name)[15:].any(), name


def test_a_smaller_tree_leaves_nothing_of_the_larger_one():
    token_ids, log_probs = candidates("random", 2, 3, 9)
    roots, places = torch.zeros(2, dtype=torch.int64, device=DEVICE), (9, ints(0, 1), ints(4, 5))
    used, fresh = TreeBuffers(2, 9, DEVICE), TreeBuffers(2, 9, DEVICE)
    build_ddtree_pooled(roots, token_ids, log_probs, ints(9, 9), ints(3, 3), *places, used)
    for trees in (used, fresh):
        build_ddtree_pooled(roots, token_ids, log_probs, ints(2, 0), ints(1, 3), *places, trees)
    for name in EVERY_ROW:
        assert torch.equal(getattr(used, name), getattr(fresh, name)), name


def test_bad_input_is_named():
    token_ids, log_probs = candidates("random", 1, 3, 4)
    good = [torch.zeros(1, dtype=torch.int64, device=DEVICE), token_ids, log_probs, ints(4), ints(3), 4, ints(0), ints(9)]
    trees = TreeBuffers(1, 4, DEVICE, max_depths=3)
    build_ddtree_pooled(*good, trees)
    faults = [
        (0, ints(5), "root_tokens must be"),
        (2, log_probs.double(), "log_probs must be"),
        (3, torch.tensor([4], device=DEVICE), "budgets must be"),
        (5, 5, "max_budget must be 0 to the buffers' 4, got 5"),
        (7, torch.tensor([9], device=DEVICE), "context_lengths must be int32"),
    ]
    for place, value, message in faults:
        with pytest.raises(ValueError, match=message):
            build_ddtree_pooled(*good[:place], value, *good[place + 1 :], trees)
    with pytest.raises(ValueError, match="max_depths=3"):
        build_ddtree_pooled(*good, TreeBuffers(1, 4, DEVICE, max_depths=2))
    with pytest.raises(ValueError, match="trees hold 2 sequences"):
        build_ddtree_pooled(*good, TreeBuffers(2, 4, DEVICE))
    for sizes in ((1, 1025), (0, 4), (1, -1)):
        with pytest.raises(ValueError, match="must be"):
            TreeBuffers(*sizes, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("max_budget", [1, 2, 15, 16, 63, 64, 127, 255, 512, 1000, 1024])
@pytest.mark.parametrize("kind", ["random", "coarse", "certain", "excluded"])
def test_true_shapes_on_the_device(kind, max_budget):
    check_build("triton", kind, 15, max_budget, max_budget, [max_budget, max_budget // 2, -1, 0, max_budget])


@pytest.mark.gpu
def test_thousands_of_equal_scores_on_the_device():
    check_build("triton", "equal", 15, 1024, 1024, [1024, 100])


@pytest.mark.gpu
def test_a_captured_build_follows_its_inputs():
    token_ids, log_probs = candidates("random", 2, 15, 64)
    budgets, roots = ints(64, 64), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    trees, places = TreeBuffers(2, 64, DEVICE), (64, ints(0, 1), ints(4, 5))
    arguments = (roots, token_ids, log_probs, budgets, ints(15, 15), *places, trees)
    build_ddtree_pooled(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_ddtree_pooled(*arguments)
    for seed, budget in ((1, 64), (2, 5), (3, 0), (4, 33)):
        ids, scores = candidates("coarse", 2, 15, 64, seed)
        token_ids.copy_(ids)
        log_probs.copy_(scores)
        budgets.fill_(budget)
        graph.replay()
        for b in range(2):
            check_sequence(trees, b, expected_tree(0, ids[b], scores[b], 15, budget), b, 4 + b)
