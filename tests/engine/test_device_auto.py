"""The budget of rounds that run whole on the device: the one of most tokens per second, by what trees promise and rounds cost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.synthetic import ACCURACIES
from ddtree.engine.belief import Belief, promises
from ddtree.engine.device_auto import LADDER, PROBE_EVERY, RECONSIDERED, DeviceAuto
from ddtree.engine.device_rounds import BATCHES, BUDGETS
from ddtree.engine.graphs import bucket_of
from ddtree.engine.request import Request
from ddtree.engine.sequence import Sequence
from ddtree.tree.build import Candidates, build_ddtree
from ddtree.tree.draft_tree import DraftTree


def test_each_budget_of_the_ladder_is_captured_as_it_is_and_fills_whole_tiles():
    assert all(budget in BUDGETS and (1 + budget) & budget == 0 for budget in LADDER)


@pytest.mark.parametrize(("accepted", "best"), [(0.0, 0), (0.5, 7), (1.0, 31)])
def test_auto_takes_the_budget_of_most_tokens_per_second(accepted, best):
    auto = DeviceAuto(None, {}, block_size=16, max_budget=64)
    auto.costs[1, False, False] = np.array([1.0, 1.10, 1.12, 1.5, 1.6, 3.0])
    promised = np.array([0.0, 1.5, 2.0, 2.5, 3.4, 4.0])
    sequence = Sequence(0, Request((1,), 50), tree_budget=64)
    sequence.auto = Belief(promised, accepted, 1.0)
    auto.plan([sequence])
    expected = 1 + accepted * promised
    rates = expected / auto.costs[1, False, False]
    assert sequence.tree_budget == auto.ladder[rates.argmax()]
    assert (sequence.tree_budget == 0) == (best == 0)


def test_auto_looks_again_after_plain_rounds():
    auto = DeviceAuto(None, {}, block_size=16, max_budget=8)
    auto.costs[1, False, False] = np.array([1.0, 1.3, 1.6])
    sequence = Sequence(0, Request((1,), 500), tree_budget=8)
    sequence.auto = Belief(np.zeros(3), 0.0, 1.0)
    budgets = []
    for _ in range(2 * PROBE_EVERY + 2):
        auto.plan([sequence])
        budgets.append(sequence.tree_budget)
        sequence.auto.num_plain = 0 if sequence.tree_budget else sequence.auto.num_plain + 1
    assert budgets.count(3) == 1 + (len(budgets) - PROBE_EVERY - 1) // (PROBE_EVERY + 1)
    assert budgets.count(0) == len(budgets) - budgets.count(3)


def scored_batch(auto: DeviceAuto, count: int, scored_costs, drafter_costs) -> list[Sequence]:
    """So many sequences with an adapter, which at budget 7 promises 2.2 tokens where the drafter alone does 2."""
    auto.costs[bucket_of(count, BATCHES), False, True] = np.array(scored_costs)
    auto.costs[bucket_of(count, BATCHES), False, False] = np.array(drafter_costs)
    sequences = [Sequence(n, Request((1,), 500), tree_budget=8, conditioned=True, drafter_state=object()) for n in range(count)]
    for sequence in sequences:
        auto.open(sequence)
    return sequences


def test_auto_leaves_the_adapter_out_of_a_large_batch_where_it_does_not_pay():
    auto = DeviceAuto(None, {"0": {"3": 2.1, "7": 3.2}}, 16, 8, {"0": {"3": 2.0, "7": 3.0}})
    sequences = scored_batch(auto, 8, [1.0, 1.5, 1.6], [1.0, 1.2, 1.3])
    auto.plan(sequences)
    assert all(s.spared and s.tree_budget == 7 for s in sequences)
    assert sequences[0].auto.tokens(16)[-1] == pytest.approx(3.0), "what is believed follows"
    late = Sequence(9, Request((1,), 500), tree_budget=8, conditioned=True, drafter_state=object())
    auto.open(late)
    assert late.spared
    assert late.auto.tokens(16)[-1] == pytest.approx(3.0)
    few = sequences[:4]
    auto.costs[4, False, True] = np.array([1.0, 1.2, 1.3])
    auto.plan(few)
    assert not any(s.spared for s in few), "a small batch keeps it"
    assert few[0].auto.tokens(16)[-1] == pytest.approx(3.2)
    auto.costs[8, False, True][:] = [1.0, 1.2, 1.3]  # and so does a large one where it costs next to nothing
    for _ in range(RECONSIDERED):
        auto.plan(sequences)
    assert not any(s.spared for s in sequences)


def test_auto_leaves_scorings_alone_that_a_request_chose():
    auto = DeviceAuto(None, {"0": {"3": 2.1, "7": 3.2}}, 16, 8, {"0": {"3": 2.0, "7": 3.0}})
    sequences = scored_batch(auto, 8, [1.0, 1.5, 1.6], [1.0, 1.2, 1.3])
    sequences[3].auto = None  # a pinned budget
    auto.plan(sequences)
    assert not any(s.spared for s in sequences)
    sequences = scored_batch(auto, 8, [1.0, 1.5, 1.6], [1.0, 1.2, 1.3])
    sequences[3].conditioned = False
    auto.plan(sequences)
    assert not any(s.spared for s in sequences)
    sequences = scored_batch(auto, 8, [1.0, 1.5, 1.6], [1.0, 1.2, 1.3])
    sequences[3].request = replace(sequences[3].request, scoring="conditioned")
    auto.plan(sequences)
    assert not any(s.spared for s in sequences), "asked for by name"


def test_what_a_tree_promises_at_other_budgets():
    scores = np.log(np.array([1.0, 0.5, 0.25, 0.25, 0.125], dtype=np.float32))
    tree = DraftTree(np.arange(5), np.array([-1, 0, 1, 0, 2]), np.array([0, 1, 2, 1, 3]), scores)
    ((promised, expected),) = promises([tree.scores], [0, 1, 2, 4, 8, 16])
    assert promised[:4] == pytest.approx([0, 0.5, 0.75, 1.125])
    assert expected == pytest.approx(1.125)
    # Each doubling beyond brings a falling share of what the last one, 0.375, brought.
    assert 0 < promised[5] - promised[4] < promised[4] - promised[3] < 0.375


def test_a_tree_that_keeps_gaining_is_believed_to_go_on():
    """Whose doublings brought ever the same, as a good drafter's do; with one that fades, less."""

    def beyond(gains) -> float:
        scores = np.log(np.concatenate([[1.0], *(np.full(n, gain / n) for n, gain in zip((1, 1, 2, 4), gains, strict=True))]))
        tree = DraftTree(np.arange(9), np.arange(-1, 8), np.arange(9), scores.astype(np.float32))
        ((promised, _),) = promises([tree.scores], [0, 8, 16])
        return promised[2] - promised[1]

    assert beyond([0.9, 0.6, 0.6, 0.6]) == pytest.approx(0.9 * 0.6, rel=1e-4)
    assert beyond([0.9, 0.6, 0.6, 0.48]) == pytest.approx(0.8 * 0.48, rel=1e-4)
    assert beyond([0.9, 0.6, 0.6, 0.12]) == pytest.approx(0.5 * 0.12, rel=1e-4)


def declared_tree(budget: int) -> DraftTree:
    """The tree of `benchmarks.synthetic`'s acceptance, a chain of ranks at each depth."""
    ranks = [np.log(a) + np.arange(32) * np.log(1 - a) for a in ACCURACIES]
    candidates = Candidates(np.tile(np.arange(32), (15, 1)), np.array(ranks, dtype=np.float32))
    return build_ddtree(1, candidates, budget)


@pytest.mark.parametrize("first", [15, 31, 63, 127])
def test_auto_finds_the_best_budget_whichever_it_begins_with(first):
    """Costs of a 27B target on an H200, where each doubling brings 0.7 tokens and 63 nodes are best."""
    auto = DeviceAuto(None, {"0.0": {"4": 2.5, "16": 3.3, "64": 4.2}}, block_size=16, max_budget=127)
    auto.costs[1, False, False] = np.array([14.1, 16.5, 16.6, 16.77, 17.18, 18.44, 21.07])
    sequence = Sequence(0, Request((1,), 5000), tree_budget=127, drafter_state=object())
    auto.open(sequence)
    auto.chosen = auto.ladder.index(first)
    budgets = []
    for _ in range(200):
        auto.plan([sequence])
        tree = declared_tree(sequence.tree_budget)
        promised = float(np.exp(tree.scores[1:].astype(np.float64)).sum())
        auto.observe([(sequence, SimpleNamespace(num_drafted=tree.num_drafted, seen=tree, acceptance_length=1 + promised))])
        budgets.append(sequence.tree_budget)
    assert budgets[40:].count(63) == len(budgets) - 40, budgets


@pytest.mark.parametrize("conditioned", [False, True])
def test_drawing_in_numbers_costs_what_one_adds_and_is_not_timed_in_service(conditioned):
    """After a start nobody waits for the whole ladder of a batch that draws to be captured and timed."""
    state = SimpleNamespace(conditioning=object() if conditioned else None, max_rows=1025)
    auto = DeviceAuto(SimpleNamespace(state=state, compile_ahead=lambda *_: None), {"0": {"4": 2.5, "64": 3.5}}, 16, 64)
    timed = []

    def time_of(shape):
        timed.append(shape)
        adapter = 0.2 if shape.conditioned else 0.0
        return 1.0 + shape.num_sequences * (0.01 * shape.max_budget + adapter + (0.05 if shape.sampled else 0.0))

    auto._time = time_of
    auto.prepare(8, 512)
    at_start = len(timed)
    for count in (2, 3, 8):
        for scored in {conditioned, False}:
            bucket = bucket_of(count, BATCHES)
            expected = [1.0 + bucket * (0.01 * b + 0.05 + (0.2 if scored and b else 0.0)) for b in auto.ladder if bucket * (1 + b) <= 1025]
            known = bucket < 8 and conditioned and not scored  # small batches keep the adapter
            if not known:
                assert auto.costs_of(count, True, scored) == pytest.approx(expected)
    assert len(timed) == at_start
