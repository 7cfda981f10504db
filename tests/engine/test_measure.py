"""Timed rounds on a simulated clock: medians per budget, ladders that end where nothing can pay or the time is up."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ddtree.budget.store import CostStore
from ddtree.doctor.hybrid import random_hybrid
from ddtree.engine.config import EngineConfig
from ddtree.engine.measure import (
    PROBE_BUDGETS,
    Bench,
    Timing,
    benching,
    is_steady,
    measure_costs,
    measure_rounds,
    start_auto,
)
from ddtree.engine.pooled import pooled_engine
from ddtree.engine.request import Request
from tests.scripted import scripted_engine


class NodeClock:
    """A step takes 1 s, and 0.1 s more per node of the budget in force."""

    def __init__(self, engine):
        self.now, step = 0.0, engine.step

        def timed_step():
            self.now += 1 + 0.1 * sum(sequence.tree_budget for sequence in engine.scheduler.running)
            return step()

        engine.step = timed_step

    def __call__(self) -> float:
        return self.now


def test_measuring_leaves_the_engine_idle_and_times_every_budget():
    engine = scripted_engine(0.5)
    rounds = measure_rounds(engine, (4, 128), clock=NodeClock(engine), limit_s=10_000)
    assert not engine.has_work
    assert rounds == {0: pytest.approx(1), 4: pytest.approx(1.4), 128: pytest.approx(13.8)}


def test_measuring_ends_at_its_limit():
    engine = scripted_engine(0.5)
    clock = NodeClock(engine)
    rounds = measure_rounds(engine, PROBE_BUDGETS, clock=clock, limit_s=15)
    assert set(rounds) >= {0, 1, 2} and 128 not in rounds and not engine.has_work


@pytest.mark.parametrize("chain", [False, True])
def test_over_pools_the_round_that_was_asked_for_is_timed(chain):
    """Rounds are launched ahead there, with the budget of the round before."""
    pair = random_hybrid("cpu", torch.float32)
    config = EngineConfig(max_context=128, max_tree_budget=16, prefill_chunk=64)
    engine = pooled_engine(pair.target.model, pair.drafter.model, config)
    with benching(engine, 5, "factorised", chain) as bench:
        for budget in (5, 2, 0, 4, 4):
            timing = bench.round(budget)
            assert timing.num_rows == 1 + budget and timing.verify_s > 0
    assert not engine.has_work
    assert set(measure_rounds(engine, (5, 2), passes=1, chain=chain)) == {0, 2, 5}


def timings(spread: float, passes: int = 3):
    """Rounds that take up to `spread` times as long as they should."""
    rng = np.random.default_rng(0)
    return {
        budget: [Timing(budget + 1, s, 0.1, s + 0.1) for s in (1 + 0.1 * budget) * rng.uniform(1, spread, passes)]
        for budget in (0, 1, 2, 4, 8)
    }


def test_a_busy_machine_is_told_from_a_quiet_one():
    assert is_steady(timings(1.1))
    assert not is_steady(timings(3.0))
    assert not is_steady(timings(1.0, passes=1)), "what was timed once proves nothing"


def test_costs_from_a_busy_machine_are_not_kept(tmp_path, monkeypatch):
    engine, store = scripted_engine(0.5), CostStore(tmp_path)
    engine.config = replace(engine.config, max_tree_budget=8)
    monkeypatch.setattr("ddtree.engine.measure.is_steady", lambda timings: False)
    # Not the real clock: a hiccup in rounds of microseconds would end the ladder before 9 rows.
    monkeypatch.setattr(Bench, "round", lambda self, budget: Timing(1 + budget, 1 + 0.1 * budget, 0.1, 1.1 + 0.1 * budget))
    cost = start_auto(engine, {"0": {"4": 2.0}}, store, limit_s=1).cost
    assert not list(tmp_path.iterdir())
    before = cost.verify.at(9)
    for _ in range(12):  # and real rounds soon outvote them
        cost.observe(1, cost.verify.at(1))
        cost.observe(9, before / 2)
    assert cost.verify.at(9) / cost.verify.at(1) < 0.75 * before / cost.verify.at(1)


def test_sizes_that_were_not_timed_are_not_taken_for_free(monkeypatch):
    """On a starved machine two or three small rounds cost alike: the last slope, 0, must not buy a thousand rows."""
    monkeypatch.setattr(Bench, "round", lambda self, budget: Timing(1 + budget, 1.0, 0.1, 1.1))
    cost, keep = measure_costs(scripted_engine(0.5), {"0": {"4": 2.0}}, limit_s=0)
    assert not keep
    assert cost.verify.at(1025) > 50 * cost.verify.at(1)
    assert cost.verify.at(5) < 2 * cost.verify.at(1), "small trees stay worth a try"
    before = cost.verify.at(200)
    cost.observe(200, 2 * before)  # and such rounds teach, since they lie within the curve
    assert cost.verify.upto(1025)[200] >= before and cost.verify.counts[-1] == 1025


@pytest.mark.parametrize("max_context", [8, 12, 40])
@pytest.mark.parametrize("skill", [0.0, 1.0])
def test_a_short_context_is_measured_in_too(max_context, skill):
    engine = scripted_engine(skill)
    engine.config = replace(engine.config, max_context=max_context, max_tree_budget=16)
    start_auto(engine, {"0": {"4": 2.0}}, limit_s=1)
    assert not engine.has_work
    assert engine.generate(Request((1, 2), max_context - 2, tree_budget="auto")).stats.output_tokens == max_context - 2
