"""The default budget: chosen by measured cost and known gain, 0 where nothing pays."""

import pytest

from ddtree.engine.calibrate import acceptance_at, choose_budget, measure_rounds
from tests.scripted import scripted_engine

CARD = {"0": {"4": 2.4, "16": 3.0, "64": 3.5}, "0.8": {"4": 2.0, "16": 2.2, "64": 2.4}}


def test_acceptance_is_interpolated_and_never_extrapolated():
    row = CARD["0"]
    assert acceptance_at(row, 0) == 1.0
    assert acceptance_at(row, 4) == pytest.approx(2.4)
    assert 2.4 < acceptance_at(row, 8) < 3.0
    assert acceptance_at(row, 1024) == 3.5


@pytest.mark.parametrize(
    ("round_s", "budget"),
    [
        ({0: 1.0, 4: 1.2, 16: 1.25, 64: 1.3}, 64),  # nodes are nearly free
        ({0: 1.0, 4: 1.5, 16: 2.5, 64: 6.0}, 4),  # small trees pay
        ({0: 1.0, 4: 2.1, 16: 4.0}, 0),  # pays when greedy, not when sampled
        ({0: 1.0}, 0),
    ],
)
def test_the_worst_temperature_decides(round_s, budget):
    assert choose_budget(round_s, CARD).budget == budget


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
    rounds = measure_rounds(engine, CARD, clock=NodeClock(engine), limit_s=1000)
    assert not engine.has_work
    assert rounds[0] == pytest.approx(1) and rounds[4] == pytest.approx(1.4)
    assert 128 not in rounds
    assert choose_budget(rounds, CARD).budget in (2, 4, 6)


def test_measuring_ends_at_its_limit():
    engine = scripted_engine(0.5)
    clock = NodeClock(engine)
    rounds = measure_rounds(engine, CARD, clock=clock, limit_s=10)
    assert clock.now < 14
    assert set(rounds) >= {0, 2} and not engine.has_work
