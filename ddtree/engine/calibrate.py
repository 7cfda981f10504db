"""The default tree budget, from a measurement at start-up: what a round costs here, times what it is known to bring.

speedup(budget) = acceptance length * plain round / round with that budget (docs/decode_round.md). The acceptance lengths come
from the drafter's card, measured once on real prompts; the times are this machine's, now. Where speculation does not
pay at both ends of the usual temperatures, the default is 0: plain decoding.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ddtree.engine.engine import Engine
from ddtree.engine.request import Request

PROBE_BUDGETS = (2, 4, 6, 8, 12, 16, 24, 32, 64, 128)
MARGIN = 1.03  # a budget must beat plain decoding by more than the measurement's own noise
HOPELESS = 0.8  # of the best speedup so far: costs only rise from there, so larger budgets are not tried
PASSES = 4

Card = Mapping[str, Mapping[str, float]]  # temperature -> budget -> mean acceptance length


@dataclass(frozen=True)
class BudgetChoice:
    """The measured default and what it rests on. Times in seconds."""

    budget: int
    round_s: dict[int, float]
    speedup: dict[int, float]  # predicted, the worse of the card's temperatures
    reason: str


def acceptance_at(card: Mapping[str, float], budget: int) -> float:
    """The card's mean acceptance length at a budget, interpolated in log(budget + 1); 1.0 at budget 0."""
    points = sorted([(0, 1.0)] + [(int(key), float(value)) for key, value in card.items() if int(key) > 0])
    if budget >= points[-1][0]:
        return points[-1][1]
    upper = next(i for i, (known, _) in enumerate(points) if known > budget)
    (low, low_value), (high, high_value) = points[upper - 1], points[upper]
    share = (math.log1p(budget) - math.log1p(low)) / (math.log1p(high) - math.log1p(low))
    return low_value + share * (high_value - low_value)


def speedup_at(budget: int, seconds: float, plain_s: float, acceptance: Card) -> float:
    """Predicted tokens per second over plain decoding's, at the card's worst temperature."""
    return min(acceptance_at(row, budget) for row in acceptance.values()) * plain_s / seconds


def measure_rounds(
    engine: Engine,
    acceptance: Card,
    budgets=PROBE_BUDGETS,
    passes: int = PASSES,
    limit_s: float = 8.0,
    clock=time.perf_counter,
) -> dict[int, float]:
    """Median seconds of one decode round per budget, 0 included; ends after `limit_s`, with what it has by then.

    One sequence serves all: its budget is changed between rounds, and the passes interleave the budgets, so that a drift
    of the machine hits all alike. Ladders end where a budget is hopeless on the first pass.
    """
    room = engine.config.max_context
    prompt = tuple((7 * i + 3) % engine.vocab_size for i in range(min(64, room // 2)))
    deadline = clock() + limit_s
    request_id = engine.add(Request(prompt, max_tokens=room - len(prompt), tree_budget=max(budgets)))
    engine.step()
    sequence = engine.running(request_id)

    def round_at(budget: int) -> float:
        sequence.tree_budget = min(budget, engine.config.max_tree_budget)
        started = clock()
        engine.step()
        return clock() - started

    for budget in (0, budgets[0], 0):
        round_at(budget)  # warm up
    times: dict[int, list[float]] = {0: [min(round_at(0), round_at(0))]}
    best = 1.0
    for budget in budgets:
        times[budget] = [round_at(budget)]
        speedup = speedup_at(budget, times[budget][0], times[0][0], acceptance)
        best = max(best, speedup)
        if speedup < HOPELESS * best:
            break
        if clock() > deadline:
            break
    for _ in range(passes - 1):
        for budget, values in times.items():
            if clock() > deadline:
                break
            values.append(round_at(budget))
    engine.abort(request_id)
    return {budget: statistics.median(values) for budget, values in times.items()}


def choose_budget(round_s: Mapping[int, float], acceptance: Card) -> BudgetChoice:
    """The budget of the best predicted speedup, judged at the card's worst temperature."""
    speedup = {b: speedup_at(b, seconds, round_s[0], acceptance) for b, seconds in round_s.items() if b}
    best = max(speedup, key=speedup.get, default=0)
    if not best or speedup[best] < MARGIN:
        return BudgetChoice(0, dict(round_s), speedup, "no budget beats plain decoding here")
    return BudgetChoice(best, dict(round_s), speedup, f"{speedup[best]:.2f} x plain decoding predicted")
