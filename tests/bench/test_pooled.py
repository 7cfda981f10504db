"""Numbers from known times."""

import pytest

from ddtree.bench.pooled import acceptance_by_depth, acceptance_length, summarise
from tests.bench.outputs import drafted, plain


def rows(passes=3):
    made = []
    for number in range(5):
        for slow in range(passes):
            made.append(plain(f"p{number}", e2e_s=0.5 + 3.9 * (1 + slow / 10)))
            made.append(drafted("8", f"p{number}", e2e_s=0.5 + 1.95 * (1 + slow / 10)))
    return made


def test_ratios_are_pooled():
    summary = summarise(rows())
    assert summary["8"]["speedup"]["pooled"] == pytest.approx(2)
    assert summary["0"]["tokens_per_s"]["pooled"] == pytest.approx(39 / (3.9 * 1.1), rel=1e-4)
    assert summary["0"]["tokens_per_s"]["max"] == pytest.approx(10)
    long = [*rows(1), plain("long", range(400)), drafted("8", "long", range(400), e2e_s=0.5 + 399 * 0.1)]
    pooled = summarise(long)["8"]["speedup"]["pooled"]
    assert pooled == pytest.approx((5 * 3.9 + 39.9) / (5 * 1.95 + 39.9), rel=1e-3), "not the mean of ratios"


def test_the_interval_covers_the_spread_between_passes():
    low, high = summarise(rows())["8"]["tokens_per_s"]["interval"]
    assert 39 / (1.95 * 1.2) < low < 39 / (1.95 * 1.1) < high < 39 / 1.95
    tight = summarise(rows(1))["8"]["speedup"]["interval"]
    assert tight == [pytest.approx(2), pytest.approx(2)]


def test_acceptance():
    outputs = [plain(decode_rounds=4, histogram={1: 1, 3: 2, 4: 1})]
    assert acceptance_length(outputs) == 11 / 4
    assert acceptance_by_depth(outputs) == [0.75, 0.75, 0.25]
    assert acceptance_by_depth([plain()]) == []
