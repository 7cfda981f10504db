"""The cost model's curve: speedup = acceptance length x T_plain / T_round, from round times measured on their own.

The times come from one synthetic sequence (engine.measure), the acceptance lengths from this run: where curve and
measured points part, one of the two is not what it is taken for. Each configuration is timed as it was run: chains as
chains, and what leaves the adapter out without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ddtree.bench.output import CHAIN, PLAIN, scoring_of
from ddtree.engine.engine import Engine
from ddtree.engine.measure import measure_rounds


def predict(engine: Engine, acceptance: Mapping[str, float], passes: int = 3) -> dict[str, dict]:
    """Per configuration of a fixed number of nodes: the time of a round, and the speedup that it and `acceptance` promise.
    {} without any."""
    kinds: dict[tuple, dict[int, str]] = defaultdict(dict)
    for config in acceptance:
        name, scoring = scoring_of(config)
        if name == CHAIN:
            kinds[scoring, True][engine.block_size - 1] = config
        elif name.isdigit() and name != PLAIN:
            kinds[scoring, False][int(name)] = config
    points = {}
    for (scoring, chain), names in kinds.items():
        round_s = measure_rounds(engine, sorted(names), passes, scoring=scoring, chain=chain)
        points.setdefault(PLAIN, _point(round_s[0], 1.0))
        points |= {
            names[budget]: _point(seconds, acceptance[names[budget]] * round_s[0] / seconds)
            for budget, seconds in round_s.items()
            if budget
        }
    return points


def _point(seconds: float, speedup: float) -> dict[str, float]:
    return {"round_ms": round(1000 * seconds, 4), "speedup": round(speedup, 4)}
