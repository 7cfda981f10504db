"""What the host does for each sequence and round whose work is the device's: little, counted in calls rather than by a clock."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

from benchmarks.host_round import CARD, VOCAB, engine_of
from ddtree.engine.belief import Belief, promises
from ddtree.engine.device_auto import MOST_HEARD, REPLANNED, DeviceAuto
from ddtree.engine.engine import Engine
from ddtree.engine.measure import start_auto
from ddtree.engine.request import Request
from ddtree.engine.round_report import Place, RoundReport, report_width
from ddtree.engine.sequence import Sequence
from ddtree.tree.draft_tree import DraftTree

COUNT, ROUNDS = 16, 16
MOST_CALLS = {0: 65, 8: 70, "auto": 95}  # of functions, C's too, for a sequence and round: a fifth above what is needed


@pytest.fixture(scope="module", name="engine")
def _engine() -> Engine:
    engine = engine_of(COUNT, 16)
    start_auto(engine, CARD)
    return engine


def begin(engine: Engine, budget) -> None:
    for index in range(COUNT):
        prompt = tuple(np.random.default_rng(index).integers(0, VOCAB - 1, 8).tolist())
        engine.add(Request(prompt, 2000, tree_budget=budget, eos_token_ids=frozenset({VOCAB + 1})))
    while any(s.stats.decode_rounds < 2 for s in engine.scheduler.running) or not engine.scheduler.running:
        engine.step()


def end(engine: Engine) -> None:
    for sequence in list(engine.scheduler.running):
        engine.abort(sequence.request_id)
    engine.device_rounds.drain()


@pytest.mark.parametrize("budget", [0, 8, "auto"])
def test_the_host_does_little_for_each_sequence_and_round(engine, budget, monkeypatch):
    begin(engine, budget)
    calls, made, asked = Counter(), Counter(), Belief.tokens
    make = DraftTree.__init__
    monkeypatch.setattr(DraftTree, "__init__", lambda *given, **named: made.update(["tree"]) or make(*given, **named))
    monkeypatch.setattr(Belief, "tokens", lambda self, size: made.update(["tokens"] if self._tokens is None else []) or asked(self, size))

    def count(frame, event, _):
        if event in ("call", "c_call") and not inside(frame):
            calls[event] += 1

    sys.setprofile(count)
    try:
        for _ in range(ROUNDS):
            engine.step()
    finally:
        sys.setprofile(None)
        end(engine)
    each = calls.total() / ROUNDS / COUNT
    assert each <= MOST_CALLS[budget], f"{each:.1f} calls for a sequence and round"
    assert made["tree"] == 0, "a tree is made when somebody wants it"
    assert made["tokens"] <= (ROUNDS + 1) * MOST_HEARD, "what a belief says is worked out once for each tree that it learns from"


def inside(frame) -> bool:
    """Whether the frame is of what stands for the device."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("host_round.py"):
            return True
        frame = frame.f_back
    return False


def test_auto_plans_each_round_that_is_launched_ahead(engine, monkeypatch):
    """So that a budget that has become worth it is taken up in the middle of a request."""
    begin(engine, "auto")
    auto = engine.auto
    monkeypatch.setattr(auto, "timed", lambda shape, seconds: None)
    costs = auto.costs_of(COUNT, False)
    best = []
    for rung in (1, 2):
        costs[:] = 100.0
        costs[rung] = 1.0
        for _ in range(REPLANNED + 3):
            emissions = engine.step()
        best.append({each.round.num_drafted for each in emissions})
    end(engine)
    del auto.costs[COUNT, False, False]
    assert best == [{3}, {7}]


def test_a_probe_is_counted_once_and_a_plain_round_beside_it_is_not_explained(engine, monkeypatch):
    monkeypatch.setattr("ddtree.engine.device_auto.PROBE_EVERY", 5)
    auto = engine.auto
    monkeypatch.setattr(auto, "timed", lambda shape, seconds: None)
    costs = auto.costs_of(COUNT, False)
    costs[:] = 1000.0
    costs[0] = 1.0
    begin(engine, "auto")
    sequences = list(engine.scheduler.running)
    before = [(s.stats.probe_rounds, s.stats.predicted_s, s.stats.predicted_plain_s - s.stats.predicted_tokens / 1000) for s in sequences]
    drafted = Counter()
    for _ in range(40):
        drafted.update(each.request_id for each in engine.step() if each.round.num_drafted)
    for sequence, (probes, seconds, off) in zip(sequences, before, strict=True):
        stats, number = sequence.stats, drafted[sequence.request_id]
        assert 2 <= number <= 8 and stats.probe_rounds - probes == number
        assert stats.predicted_s - seconds == pytest.approx(number * 1.0 + (40 - number) / 1000)
        assert stats.predicted_plain_s - stats.predicted_tokens / 1000 == pytest.approx(off)
        assert stats.reason is None, "a round planned plain has nothing to excuse"
    end(engine)
    del auto.costs[COUNT, False, False]


def asking(count: int) -> tuple[DeviceAuto, list[Sequence]]:
    auto = DeviceAuto(None, {"0": {"3": 2.0, "7": 3.0}}, 16, 7)
    auto.costs[count, False, False] = np.array([1.0, 1.0, 2.0])
    sequences = [Sequence(n, Request((1,), 500), tree_budget=7, drafter_state=object()) for n in range(count)]
    for sequence in sequences:
        auto.open(sequence)
    auto.plan(sequences)
    assert {s.tree_budget for s in sequences} == {3}
    auto.costs[count, False, False] = np.array([1.0, 2.0, 1.0])
    return auto, sequences


def test_a_large_batch_keeps_its_budget_for_some_rounds():
    auto, sequences = asking(16)
    budgets = []
    for _ in range(2 * REPLANNED):
        auto.plan(sequences)
        budgets.append(sequences[0].tree_budget)
    assert budgets == [3] * (REPLANNED - 1) + [7] * (REPLANNED + 1)


def test_a_small_batch_and_another_one_are_planned_at_once():
    auto, few = asking(4)
    auto.plan(few)
    assert {s.tree_budget for s in few} == {7}
    auto, sequences = asking(16)
    auto.plan(list(sequences))  # as after somebody came or went
    assert {s.tree_budget for s in sequences} == {7}
    auto, sequences = asking(16)
    sequences[3].auto.room = 2
    auto.plan(sequences)
    assert sequences[3].tree_budget == 2, "memory is never planned beyond"


def test_a_report_is_read_as_it_was_written():
    rows = np.zeros((2, report_width(4, 6)), dtype=np.int64)
    scores = np.array([0.0, -0.5, -1.25], dtype=np.float32)
    rows[1, :3], rows[1, 5:7] = [2, 40, 41], [0, 1]
    rows[1, 9] = 3
    rows[1, 10:].reshape(4, 6)[:, :3] = [7, 40, 50], [-1, 0, 0], [0, 1, 1], scores.view(np.int32)
    rows[0, :2], rows[0, 9] = [1, 9], 1
    report = RoundReport(rows, 4, has_trees=True)
    assert report.token_ids == [[9], [40, 41]] and report.num_drafted == [0, 2]
    place = Place(report, 1, 7)
    assert place.tree.token_ids.tolist() == [7, 40, 50] and place.tree.parents.tolist() == [-1, 0, 0]
    assert place.tree.scores.tolist() == place.scores.tolist() == scores.tolist()
    assert place.acceptance.path.tolist() == [0, 1] and place.acceptance.bonus_token == 41
    assert Place(report, 0, 5).tree.token_ids.tolist() == [5] and Place(report, 0, 5).acceptance.token_ids.tolist() == [9]


def test_trees_of_several_sizes_promise_side_by_side_what_they_promise_alone():
    several = [np.log(np.array([1.0] + [0.9 / n for n in range(1, count + 1)], dtype=np.float32)) for count in (1, 3, 15)]
    together = promises(several, [0, 3, 7, 31])
    for scores, (promised, expected) in zip(several, together, strict=True):
        ((alone, whole),) = promises([scores], [0, 3, 7, 31])
        assert promised == pytest.approx(alone) and expected == pytest.approx(whole) == pytest.approx(float(np.exp(scores[1:]).sum()), rel=1e-5)
