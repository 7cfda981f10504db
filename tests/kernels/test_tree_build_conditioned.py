"""Trees whose scores depend on the parent, many sequences at once, against `tree.build.grow`: the twin, and the Triton kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree.kernels.conditioning import PathScores
from ddtree.kernels.tree_build import TreeBuffers, build_ddtree_pooled, build_ddtree_pooled_reference
from ddtree.tree.build import UNITS_PER_NAT, Level, grow
from ddtree.tree.draft_tree import DraftTree
from tests.kernels.test_tree_build_pooled import (
    DEVICE,
    candidates,
    check_padding,
    check_sequence,
    ints,
    poisoned,
)

KINDS = ("random", "coarse", "certain", "equal", "tiny", "excluded", "steep")
BUDGETS = (*range(65), 128, 255, 256, 512, 1024)


class Source:
    """Children of every node of a level from its parent's row: what the host builder is given."""

    def __init__(self, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        self.token_ids, self.costs = token_ids, np.rint(log_probs.astype(np.float64) * -UNITS_PER_NAT)

    def children(self, depth: int, level: Level, ceiling: float) -> Level | None:
        if depth > len(self.costs):
            return None
        rows = self.costs[depth - 1, np.maximum(level.ranks, 0)]
        costs = level.costs[:, None] + np.where(np.isnan(rows), np.inf, rows)
        parents, ranks = (costs <= ceiling).nonzero()
        return Level(self.token_ids[depth - 1][ranks], parents, ranks, costs[parents, ranks])


def expected_tree(root: int, token_ids: torch.Tensor, log_probs: torch.Tensor, budget: int) -> DraftTree:
    if budget == 0:
        return DraftTree.root_only(root)
    return grow(root, Source(token_ids.cpu().numpy(), log_probs.cpu().numpy()), budget)


class OlderSource:
    """The same of a `PathScores`: rows for a node and its parent."""

    def __init__(self, token_ids: np.ndarray, scores: PathScores) -> None:
        self.token_ids, self.scores, self.ranks = token_ids, scores, np.zeros(1, np.int64)

    def children(self, depth: int, level: Level, ceiling: float) -> Level | None:
        if depth > len(self.token_ids):
            return None
        grandparent, own = self.ranks[level.parents] if depth > 1 else self.ranks, np.maximum(level.ranks, 0)
        self.ranks = own
        rows = self.scores.rows(depth, torch.from_numpy(grandparent), torch.from_numpy(own))[0].numpy()
        costs = level.costs[:, None] + np.rint(rows.astype(np.float64) * -UNITS_PER_NAT)
        parents, ranks = (costs <= ceiling).nonzero()
        return Level(self.token_ids[depth - 1][ranks], parents, ranks, costs[parents, ranks])


def build_by(way: str):
    if way == "twin":
        return build_ddtree_pooled_reference
    pytest.importorskip("triton")
    from ddtree.kernels.tree_build.triton_conditioned import build_conditioned_pooled_triton

    return build_conditioned_pooled_triton


def scores(kind: str, sequences: int, depths: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, D, M], 0 among them, and log-probabilities [B, D, M, M], rows in no order."""
    rng = np.random.default_rng(seed)
    shape = (sequences, depths, width, width)
    log_probs = torch.from_numpy(rng.normal(size=shape) * (8 if kind == "steep" else 2)).float().log_softmax(dim=-1)
    if kind == "coarse":  # paths tie within and across depths; in deep trees none is free, or the host's levels would explode
        log_probs = -torch.from_numpy(rng.integers(int(depths > 5), 5, size=shape)).float() / 2
    if kind == "certain":  # some child of every parent ties with it
        places = torch.from_numpy(rng.integers(0, width, size=shape[:-1]))
        log_probs.scatter_(-1, places[..., None], 0.0)
    if kind == "equal":
        log_probs[:] = -0.25
    if kind == "tiny":  # below a unit of 2^-40 nats: rounded, half to even
        log_probs *= 2.0**-41
    if kind == "excluded":
        log_probs[torch.from_numpy(rng.random(shape) < 0.4)] = -torch.inf
        log_probs[torch.from_numpy(rng.random(shape) < 0.1)] = torch.nan
        log_probs[:, depths // 2, ::2] = -torch.inf
    ids = np.stack([rng.permutation(width) for _ in range(sequences * depths)]).reshape(shape[:-1])
    return torch.from_numpy(ids).to(DEVICE), log_probs.to(DEVICE)


def check_build(way: str, kind: str, depths: int, width: int, max_budget: int, budgets: list[int], seed: int = 0) -> None:
    count = len(budgets)
    token_ids, log_probs = scores(kind, count, depths, width, seed)
    num_depths = [max(0, depths - b) for b in range(count)]
    for b, kept in enumerate(num_depths):
        log_probs[b, kept:] = 0.0  # the best of all, were they read
    log_probs[:, 0, 1:] = 0.0
    roots, slots = list(range(count)), list(range(count, 0, -1))
    context_lengths = [0, *(100 + slot for slot in range(count))]
    trees = poisoned(TreeBuffers(count, max_budget, DEVICE, num_candidates=width))
    rest = (ints(*budgets), ints(*num_depths), max_budget, ints(*slots), ints(*context_lengths), trees)
    build_by(way)(torch.tensor(roots, device=DEVICE), token_ids, log_probs, *rest)
    for b, budget in enumerate(budgets):
        expected = None
        if budget >= 0:
            kept = slice(0, num_depths[b])
            expected = expected_tree(roots[b], token_ids[b, kept], log_probs[b, kept], min(budget, max_budget))
        check_sequence(trees, b, expected, slots[b], context_lengths[slots[b]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["twin", "triton"])
def test_every_sequence_gets_the_builders_tree(way, kind):
    check_build(way, kind, depths=5, width=11, max_budget=24, budgets=[24, -1, 9])


def grandparent_scores(kind: str, sequences: int, depths: int, width: int, seed: int) -> tuple[torch.Tensor, PathScores]:
    """Token ids, and tables whose sums are log-probabilities; coarse ones add up exactly, so that paths tie."""
    token_ids, below_parent = scores("random" if kind == "random" else "coarse", sequences, depths, width, seed)
    rng = np.random.default_rng(seed + 1)
    drawn = rng.normal(size=below_parent.shape) if kind == "random" else rng.integers(-2, 3, size=below_parent.shape) / 2
    grandparent = torch.from_numpy(drawn).float().to(DEVICE)
    grandparent[:, 0] = 0.0
    sums = below_parent[:, :, None] + grandparent[:, :, :, None]
    norms = sums.logsumexp(dim=-1) + 0.1 if kind == "random" else sums.amax(dim=-1)
    if kind == "excluded":
        below_parent[torch.from_numpy(rng.random(below_parent.shape) < 0.4).to(DEVICE)] = -torch.inf
    return token_ids, PathScores(below_parent, grandparent, norms)


@pytest.mark.parametrize("way", ["twin", "triton"])
@pytest.mark.parametrize(
    ("kind", "depths", "width", "max_budget"),
    [("random", 5, 11, 24), ("coarse", 4, 5, 12), ("excluded", 3, 9, 12), ("coarse", 1, 3, 4), ("random", 2, 64, 33)],
)
def test_grandparents_count(way, kind, depths, width, max_budget):
    budgets = [max_budget, 1, 9]
    token_ids, tables = grandparent_scores(kind, len(budgets), depths, width, seed=depths)
    trees = poisoned(TreeBuffers(len(budgets), max_budget, DEVICE, num_candidates=width))
    slots, context_lengths = [2, 0, 1], [5, 6, 7]
    arguments = (torch.arange(3, device=DEVICE), token_ids, tables, ints(*budgets), ints(depths, depths - 1, depths), max_budget)
    build_by(way)(*arguments, ints(*slots), ints(*context_lengths), trees)
    for b, budget in enumerate(budgets):
        kept = depths - (b == 1)
        source = OlderSource(token_ids[b, :kept].cpu().numpy(), PathScores(*(t[b : b + 1].cpu() for t in tables)))
        expected = grow(b, source, min(budget, max_budget))
        check_sequence(trees, b, expected, slots[b], context_lengths[slots[b]])


@pytest.mark.parametrize("way", ["twin", "triton"])
@pytest.mark.parametrize(
    ("depths", "width", "max_budget", "budgets"),
    [
        (1, 5, 5, [5, 0]),  # no depth at all for the second
        (31, 2, 6, [6]),
        (3, 2, 40, [40, 99]),  # fewer paths than the budget; one asked for more than there is room
        (15, 1, 20, [20, 3]),  # a chain
        (2, 64, 63, [63, 1, 16]),
        (3, 4, 0, [0]),
    ],
)
def test_awkward_sizes(way, depths, width, max_budget, budgets):
    check_build(way, "random", depths, width, max_budget, budgets)


@pytest.mark.parametrize("kind", ["random", "coarse", "equal"])
def test_lists_longer_than_a_tile(kind, monkeypatch):
    if DEVICE == "cpu":  # the device meets them at its true shapes
        pytest.importorskip("triton")
        monkeypatch.setattr("ddtree.kernels.tree_build.triton_conditioned.SHAPES", ((65536, 4, 64, 32, 32),))
    check_build("triton", kind, 3, 16, 40, [40])


def test_a_level_of_ties_stays_in_its_room():
    """128 children tie at the ceiling of 8 nodes; what lies behind a list of children is another sequence's."""
    build = build_by("triton")
    token_ids, log_probs = scores("equal", 1, 2, 16)
    log_probs.zero_()
    trees, roots = TreeBuffers(1, 8, DEVICE, num_candidates=16), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    behind = {name: torch.full_like(getattr(trees.scratch, name).repeat(2, 1), 77) for name in ("kid_costs", "kid_keys", "kid_pairs")}
    trees.scratch = trees.scratch._replace(**{name: rows[:1] for name, rows in behind.items()})
    build(roots, token_ids, log_probs, ints(8), ints(2), 8, ints(0), ints(0), trees)
    assert all((rows[1] == 77).all() for rows in behind.values())
    check_sequence(trees, 0, expected_tree(0, token_ids[0], log_probs[0], 8), 0, 0)


def test_a_level_of_thousands_of_children():
    check_build("triton", "random", 3, 64, 64, [64])


def test_the_twin_at_every_budget():
    for width, depths in ((1, 15), (5, 4), (16, 3)):
        for seed, kind in enumerate(("coarse", "excluded")):
            token_ids, log_probs = scores(kind, 1, depths, width, seed)
            for budget in BUDGETS if width > 1 else (0, 1, 14, 15, 16):
                trees = TreeBuffers(1, budget, "cpu")
                rest = (torch.tensor([budget]).int(), torch.tensor([depths]).int(), budget, *torch.zeros(2, 1).int(), trees)
                build_ddtree_pooled(torch.zeros(1, dtype=torch.int64), token_ids.cpu(), log_probs.cpu(), *rest)
                check_sequence(trees, 0, expected_tree(0, token_ids[0], log_probs[0], budget), 0, 0)


def test_rows_that_do_not_know_their_parent_give_the_factorised_tree():
    token_ids, log_probs = candidates("coarse", 2, 4, 6)
    table = log_probs[:, :, None].expand(2, 4, 6, 6)
    roots, few = torch.zeros(2, dtype=torch.int64, device=DEVICE), (ints(20, 7), ints(4, 3), 20, ints(0, 1), ints(4, 5))
    factorised = build_ddtree_pooled(roots, token_ids, log_probs, *few, TreeBuffers(2, 20, DEVICE))
    for way in ("twin", "triton"):
        conditioned = poisoned(TreeBuffers(2, 20, DEVICE, num_candidates=6))
        build_by(way)(roots, token_ids, table.contiguous(), *few, conditioned)
        for name in ("token_ids", "parents", "depths", "scores", "ancestor_mask", "counts"):
            assert torch.equal(getattr(conditioned, name), getattr(factorised, name)), (way, name)


@pytest.mark.parametrize("way", ["twin", "triton"])
def test_rows_lie_where_the_starts_say(way):
    token_ids, log_probs = scores("random", 3, 3, 8)
    trees = poisoned(TreeBuffers(3, 8, DEVICE, num_rows=20, num_candidates=16))
    trees.starts.copy_(ints(0, 6, 6, 15))  # the second has no rows; the last five are nobody's
    rest = (ints(8, -1, 8), ints(3, 3, 3), 8, ints(2, -1, 0), ints(10, 20, 30), trees)
    build_by(way)(torch.zeros(3, dtype=torch.int64, device=DEVICE), token_ids, log_probs, *rest)
    for b, budget in ((0, 5), (2, 8)):
        slot = [2, -1, 0][b]
        check_sequence(trees, b, expected_tree(0, token_ids[b], log_probs[b], budget), slot, [10, 20, 30][slot])
    check_sequence(trees, 1, None, -1, 0)
    check_padding(trees, slice(15, 20))


def test_a_smaller_tree_leaves_nothing_of_the_larger_one():
    token_ids, log_probs = scores("random", 2, 3, 9)
    roots, places = torch.zeros(2, dtype=torch.int64, device=DEVICE), (9, ints(0, 1), ints(4, 5))
    used, fresh = (TreeBuffers(2, 9, DEVICE, num_candidates=9) for _ in range(2))
    build = build_by("triton")
    build(roots, token_ids, log_probs, ints(9, 9), ints(3, 3), *places, used)
    for trees in (used, fresh):
        build(roots, token_ids, log_probs, ints(2, 0), ints(1, 3), *places, trees)
    for name in ("token_ids", "parents", "depths", "scores", "row_slots", "positions", "ancestor_mask", "counts"):
        assert torch.equal(getattr(used, name), getattr(fresh, name)), name


def test_bad_input_is_named():
    token_ids, log_probs = scores("random", 1, 3, 4)
    roots, few = torch.zeros(1, dtype=torch.int64, device=DEVICE), (ints(4), ints(3), 4, ints(0), ints(9))
    trees = TreeBuffers(1, 4, DEVICE, max_depths=3, num_candidates=4)
    build_ddtree_pooled(roots, token_ids, log_probs, *few, trees)
    for wrong in (log_probs[..., :3], log_probs[:, :, :3], log_probs.double()):
        with pytest.raises(ValueError, match=r"log_probs must be \[1, 3, 4, 4\] torch.float32"):
            build_ddtree_pooled(roots, token_ids, wrong, *few, trees)
    wide = scores("random", 1, 3, 65)
    with pytest.raises(ValueError, match="1 to 64 candidates per depth, got 65"):
        build_ddtree_pooled(roots, *wide, *few, trees)
    with pytest.raises(ValueError, match="num_candidates must be 0 to 64, got 65"):
        TreeBuffers(1, 4, DEVICE, num_candidates=65)
    if DEVICE == "cuda":
        with pytest.raises(ValueError, match="num_candidates=4"):
            build_ddtree_pooled(roots, token_ids, log_probs, *few, TreeBuffers(1, 4, DEVICE))


@pytest.mark.long
@pytest.mark.parametrize("width", [1, 5, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_at_many_budgets(kind, width):
    for depths, budget in ((15, 16), (4, 31), (2, 64), (3, 100)):
        check_build("triton", kind, depths, width, budget, [budget, budget // 2, -1, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 5, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_true_shapes_on_the_device(kind, width):
    for budget in (1, 2, 15, 16, 63, 64, 127, 255, 512, 1000, 1024):
        check_build("triton", kind, 15, width, budget, [budget, budget // 2, -1, 0, budget])


@pytest.mark.gpu
def test_a_captured_build_follows_its_inputs():
    token_ids, log_probs = scores("random", 2, 15, 64)
    budgets, roots = ints(64, 64), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    trees, places = TreeBuffers(2, 64, DEVICE, num_candidates=64), (64, ints(0, 1), ints(4, 5))
    arguments = (roots, token_ids, log_probs, budgets, ints(15, 15), *places, trees)
    build_ddtree_pooled(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_ddtree_pooled(*arguments)
    for seed, budget in ((1, 64), (2, 5), (3, 0), (4, 33)):
        ids, table = scores("coarse", 2, 15, 64, seed)
        token_ids.copy_(ids)
        log_probs.copy_(table)
        budgets.fill_(budget)
        graph.replay()
        for b in range(2):
            check_sequence(trees, b, expected_tree(0, ids[b], table[b], budget), b, 4 + b)
