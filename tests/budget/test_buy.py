"""The market for nodes, against all choices there are."""

from itertools import product

import numpy as np
import pytest

from ddtree.budget.buy import buy


def value(sizes, gains, verify_s, base, price, rest_s):
    tokens = sum(each[:size].sum() for each, size in zip(gains, sizes, strict=True))
    seconds = verify_s[base + sum(sizes)]
    return (len(gains) + tokens) / (rest_s + seconds) if price is None else tokens - price * seconds


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("price", [None, 0.3, 2.0])
def test_no_other_choice_is_worth_more(seed, price):
    """Over one to three sequences, costs with steps and without, pinned rows beside them."""
    rng = np.random.default_rng(seed)
    gains = [np.sort(rng.random(rng.integers(0, 6)))[::-1] for _ in range(rng.integers(1, 4))]
    base = len(gains) + int(rng.integers(0, 4))
    steps = rng.random(base + sum(map(len, gains)) + 1) * (rng.random(base + sum(map(len, gains)) + 1) < 0.6)
    verify_s = np.cumsum(0.05 + steps)
    chosen = buy(gains, verify_s, base, price, rest_s=0.4)
    best = max(value(s, gains, verify_s, base, price, 0.4) for s in product(*(range(len(g) + 1) for g in gains)))
    assert value(chosen, gains, verify_s, base, price, 0.4) == pytest.approx(best)


def test_free_rows_are_all_bought_and_dear_ones_are_not():
    gains = [np.array([0.9, 0.5, 0.1]), np.array([0.2])]
    assert buy(gains, np.ones(7), 2, price=1.0) == [3, 1]
    assert buy(gains, np.arange(7.0), 2, price=1.0) == [0, 0]
    assert buy(gains, np.arange(7.0), 2, price=0.4) == [2, 0]


def test_a_bucket_is_filled_or_left_alone():
    """Rows up to 4 cost the same, the fifth a second more: so three nodes beside the root, or enough to pay for more."""
    verify_s = np.array([0, 1, 1, 1, 1, 2, 2, 2, 2, 2.0])
    assert buy([np.full(8, 0.2)], verify_s, 1, price=1.0) == [3]
    assert buy([np.full(8, 0.3)], verify_s, 1, price=1.0) == [8]


def test_equal_gains_keep_every_tree_a_prefix():
    sizes = buy([np.full(4, 0.5), np.full(4, 0.5)], np.arange(11) * 0.1, 2, price=1.0)
    assert sizes == [4, 4]
