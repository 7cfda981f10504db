"""Timed rounds on a simulated clock: medians per budget, ladders that end where nothing can pay or the time is up."""

import pytest

from ddtree.engine.measure import PROBE_BUDGETS, measure_rounds
from tests.scripted import scripted_engine

ROW = {"4": 2.4, "16": 3.0, "64": 3.5}


class NodeClock:
    """A step takes 1 s, and 0.1 s more per node of the budget in force."""

    def __init__(self, engine):
        self.now, step = 0.0, engine.step

        def timed_step():
            self.now += 1 + 0.1 * sum(sequence.tree_budget for sequence in engine._running)
            return step()

        engine.step = timed_step

    def __call__(self) -> float:
        return self.now


def test_measuring_leaves_the_engine_idle_and_stops_where_it_is_hopeless():
    engine = scripted_engine(0.5)
    rounds = measure_rounds(engine, ROW, PROBE_BUDGETS, clock=NodeClock(engine), limit_s=1000)
    assert not engine.has_work
    assert rounds[0] == pytest.approx(1) and rounds[4] == pytest.approx(1.4)
    assert 128 not in rounds


def test_measuring_ends_at_its_limit():
    engine = scripted_engine(0.5)
    clock = NodeClock(engine)
    rounds = measure_rounds(engine, ROW, PROBE_BUDGETS, clock=clock, limit_s=10)
    assert set(rounds) >= {0, 1, 2} and not engine.has_work
    assert clock.now < 10 + 1 + 0.1 * max(PROBE_BUDGETS) + 6  # the prefill's step counts as one at the largest budget
