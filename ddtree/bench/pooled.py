"""From outputs to numbers: pooled ratios, medians with their spread, and 95 % intervals from a paired bootstrap.

A ratio is pooled: all tokens over all seconds, never a mean of per-prompt ratios. The bootstrap draws prompts, and for
each prompt its passes, with replacement; a speedup compares the same draw of both sides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from ddtree.bench.output import AUTO, CHAIN, PLAIN, Output

DRAWS = 2000
LEVEL = 95


def summarise(outputs: Sequence[Output], seed: int = 0) -> dict[str, dict]:
    """Per configuration, what the timed outputs say. Every configuration has the same items and passes."""
    table = defaultdict(lambda: defaultdict(list))
    for output in outputs:
        table[output.config][output.item_id].append(output)
    plain = table[PLAIN]
    draws = _draws(len(plain), len(next(iter(plain.values()))), seed)
    base = _matrix(plain, list(plain))
    order = sorted(table, key=config_order)
    return {
        config: _summary(table[config], _matrix(table[config], list(plain)), base, draws) for config in order
    }


def config_order(config: str) -> tuple[int, int, bool]:
    """Plain first, then the chain, then auto, then trees by budget, each before itself without the adapter."""
    name, _, without = config.partition(":")
    return ({PLAIN: 0, CHAIN: 1, AUTO: 2}.get(name, 3), int(name) if name.isdigit() else 0, bool(without))


def quantiles(values: Sequence[float]) -> dict | None:
    """Median, and where 5 and 95 % lie."""
    if not len(values):
        return None
    low, median, high = np.percentile(values, [5, 50, 95])
    return {"median": _round(median), "p5": _round(low), "p95": _round(high)}


def acceptance_length(outputs: Sequence[Output]) -> float | None:
    """Tokens per round, the bonus token included, over all rounds of all outputs."""
    rounds = sum(output.decode_rounds for output in outputs)
    return sum(n * count for o in outputs for n, count in o.histogram.items()) / rounds if rounds else None


def acceptance_by_depth(outputs: Sequence[Output]) -> list[float]:
    """Share of rounds whose path reaches depth 1, 2, ..."""
    histogram = sum((Counter(output.histogram) for output in outputs), Counter())
    rounds = sum(histogram.values())
    deepest = max(histogram, default=1)
    return [
        round(sum(count for length, count in histogram.items() if length > depth) / rounds, 4)
        for depth in range(1, deepest)
    ]


def _summary(rows: dict[str, list[Output]], matrix: np.ndarray, base: np.ndarray, draws: tuple) -> dict:
    outputs = [output for passes in rows.values() for output in passes]
    rounds = sum(output.decode_rounds for output in outputs)
    seconds, length = sum(output.decode_s for output in outputs), acceptance_length(outputs)
    stages = {name: sum(output.stage_s.get(name, 0.0) for output in outputs) for name in outputs[0].stage_s}
    return {
        "modes": sorted({output.mode or "unknown" for output in outputs}),
        "tokens_per_s": _speeds(matrix, draws),
        "speedup": _speedups(matrix, base, draws),
        "ttft_ms": quantiles([1000 * output.ttft_s for output in outputs]),
        "tpot_ms": quantiles([1000 * output.tpot_s for output in outputs if output.tpot_s is not None]),
        "itl_ms": quantiles([1000 * gap for output in outputs for gap in output.itl_s]),
        "e2e_ms": quantiles([1000 * output.e2e_s for output in outputs]),
        "acceptance_length": _round(length),
        "acceptance_by_depth": acceptance_by_depth(outputs),
        "nodes_per_round": _round(sum(output.nodes_verified for output in outputs) / rounds)
        if rounds
        else None,
        "round_ms": _round(1000 * seconds / rounds) if rounds else None,
        "stage_ms": {name: _round(1000 * total / rounds) for name, total in stages.items()} if rounds else {},
        "output_tokens": sum(output.output_tokens for output in outputs),
        "decode_rounds": rounds,
    }


def _speeds(matrix: np.ndarray, draws: tuple) -> dict:
    tokens, seconds = _pool(matrix, draws)
    return _estimate(matrix[0].sum() / matrix[1].sum(), matrix[0].sum(0) / matrix[1].sum(0), tokens / seconds)


def _speedups(matrix: np.ndarray, base: np.ndarray, draws: tuple) -> dict:
    def ratio(ours, theirs):
        return ours[0] / ours[1] * theirs[1] / theirs[0]

    per_pass = ratio(matrix.sum(1), base.sum(1))
    drawn = ratio(_pool(matrix, draws), _pool(base, draws))
    return _estimate(ratio(matrix.sum((1, 2)), base.sum((1, 2))), per_pass, drawn)


def _estimate(pooled: float, per_pass: np.ndarray, drawn: np.ndarray) -> dict:
    low, high = np.percentile(drawn, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return {
        "pooled": _round(pooled),
        "median": _round(np.median(per_pass)),
        "min": _round(per_pass.min()),
        "max": _round(per_pass.max()),
        "interval": [_round(low), _round(high)],
    }


def _matrix(rows: dict[str, list[Output]], item_ids: list[str]) -> np.ndarray:
    """`[2, items, passes]`: decode tokens and decode seconds."""
    pick = lambda name: [[getattr(output, name) for output in rows[item_id]] for item_id in item_ids]  # noqa: E731
    return np.array([pick("decode_tokens"), pick("decode_s")], dtype=np.float64)


def _draws(num_items: int, num_passes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (DRAWS, num_items)
    return rng.integers(num_items, size=shape)[..., None], rng.integers(num_passes, size=(*shape, num_passes))


def _pool(matrix: np.ndarray, draws: tuple) -> np.ndarray:
    """`[2, DRAWS]`: tokens and seconds of each draw."""
    return matrix[:, draws[0], draws[1]].sum(axis=(2, 3))


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
