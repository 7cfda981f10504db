"""The cost model's curve: speedup = acceptance length x T_plain / T_round, from round times measured on their own.

The times come from one synthetic sequence (engine.measure), the acceptance lengths from this run: where curve and
measured points part, one of the two is not what it is taken for.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddtree.budget.card import acceptance_at
from ddtree.engine.engine import Engine
from ddtree.engine.measure import measure_rounds


def predict(engine: Engine, acceptance: Mapping[str, float], passes: int = 3) -> dict[str, dict]:
    """Per tree budget: the time of a round, and the speedup that it and `acceptance` promise. {} without trees."""
    budgets = tuple(sorted(int(name) for name in acceptance if name.isdigit() and name != "0"))
    if not budgets:
        return {}
    card = {str(budget): acceptance[str(budget)] for budget in budgets}
    round_s = measure_rounds(engine, card, budgets, passes)
    return {
        str(budget): {
            "round_ms": round(1000 * seconds, 4),
            "speedup": round(acceptance_at(card, budget) * round_s[0] / seconds, 4),
        }
        for budget, seconds in round_s.items()
    }
