"""What a drafter's card promises: mean acceptance lengths by temperature and tree budget, the first experience of `auto`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Card = Mapping[str, Mapping[str, float]]  # temperature -> budget -> mean acceptance length


def acceptance_at(row: Mapping[str, float], budget: int) -> float:
    """A card's mean acceptance length at a budget, interpolated in log(budget + 1); 1.0 at budget 0."""
    points = sorted([(0, 1.0)] + [(int(key), float(value)) for key, value in row.items() if int(key) > 0])
    if budget >= points[-1][0]:
        return points[-1][1]
    upper = next(i for i, (known, _) in enumerate(points) if known > budget)
    (low, low_value), (high, high_value) = points[upper - 1], points[upper]
    share = (math.log1p(budget) - math.log1p(low)) / (math.log1p(high) - math.log1p(low))
    return low_value + share * (high_value - low_value)


def row_for(card: Card, temperature: float) -> Mapping[str, float]:
    """The row of the temperature nearest to the request's."""
    return card[min(card, key=lambda known: abs(float(known) - temperature))]


def best_budget(row: Mapping[str, float], round_s: Callable[[int], float]) -> int:
    """Of the card's budgets and those between them by doubling, the one of most tokens per second."""
    largest = max((int(key) for key in row), default=1)
    tried = sorted({int(key) for key in row if int(key)} | {2**i for i in range(largest.bit_length())})
    return max(tried, key=lambda budget: acceptance_at(row, budget) / round_s(budget))
