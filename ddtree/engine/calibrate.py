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

PROBE_BUDGETS = (0, 2, 4, 6, 8, 12, 16, 24, 32, 64)
MARGIN = 1.03  # a budget must beat plain decoding by more than the measurement's own noise


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


def measure_rounds(engine: Engine, budgets=PROBE_BUDGETS, repeats: int = 5) -> dict[int, float]:
    """Median seconds of one decode round per budget, interleaved so that a drift of the machine hits all alike."""
    room = engine.config.max_context
    prompt = tuple((7 * i + 3) % engine.vocab_size for i in range(min(96, room // 2)))
    times: dict[int, list[float]] = {budget: [] for budget in budgets}
    for _ in range(repeats):
        for budget in budgets:
            request_id = engine.add(Request(prompt, max_tokens=room - len(prompt), tree_budget=budget))
            engine.step()
            for _ in range(2):
                started = time.perf_counter()
                engine.step()
                times[budget].append(time.perf_counter() - started)
            engine.abort(request_id)
    return {budget: statistics.median(values) for budget, values in times.items()}


def choose_budget(round_s: Mapping[int, float], acceptance: Mapping[str, Mapping[str, float]]) -> BudgetChoice:
    """The budget of the best predicted speedup, judged at the card's worst temperature."""
    speedup = {
        budget: min(acceptance_at(card, budget) for card in acceptance.values()) * round_s[0] / seconds
        for budget, seconds in round_s.items()
        if budget
    }
    best = max(speedup, key=speedup.get, default=0)
    if not best or speedup[best] < MARGIN:
        return BudgetChoice(0, dict(round_s), speedup, "no budget beats plain decoding here")
    return BudgetChoice(best, dict(round_s), speedup, f"{speedup[best]:.2f} x plain decoding predicted")
