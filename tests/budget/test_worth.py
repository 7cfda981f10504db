"""Falling to plain decoding and coming back, and what trying costs; how deep to draft."""

import numpy as np
import pytest

from ddtree.budget.card import acceptance_at, best_budget, row_for
from ddtree.budget.depth import DepthProfile, geometric_ratio
from ddtree.budget.worth import Experience, Worth

PRICE = 1.0  # tokens a second by plain decoding
BAD, GOOD = Experience(0.1, 0.7), Experience(2.0, 0.7)
CARD = {"0": {"4": 2.4, "16": 3.0, "64": 3.5}, "0.8": {"4": 2.0, "16": 2.2, "64": 2.4}}


def play(worth: Worth, brings, rounds: int) -> list[str]:
    """Each round's kind; `brings(round)` is what a draft in it brings."""
    kinds = []
    for number in range(rounds):
        if worth.speculates(PRICE):
            kinds.append("probe" if worth.probing else "draft")
            worth.book(brings(number), PRICE)
        else:
            kinds.append("plain")
            worth.skip()
    return kinds


def test_a_useless_drafter_is_left_within_a_few_rounds():
    kinds = play(Worth(GOOD), lambda _: BAD, 40)
    assert 1 <= kinds.count("draft") <= 12 and "plain" not in kinds[: kinds.count("draft")]


def test_trying_costs_less_than_two_percent():
    kinds = play(Worth(BAD), lambda _: BAD, 4000)
    assert kinds[0] == "plain" and kinds.count("probe") >= 5 and "draft" not in kinds
    lost = kinds.count("probe") * (BAD.extra_s * PRICE - BAD.extra_tokens)
    assert lost < 0.015 * len(kinds)


def test_it_comes_back_when_the_text_turns_easy():
    kinds = play(Worth(GOOD), lambda number: BAD if number < 300 else GOOD, 1000)
    assert kinds[250:300].count("plain") > 40
    assert set(kinds[-100:]) == {"draft"}


def test_what_pays_is_never_left():
    assert set(play(Worth(GOOD), lambda _: GOOD, 500)) == {"draft"}


def test_a_lucky_run_of_bad_rounds_is_forgiven():
    rng = np.random.default_rng(0)
    kinds = play(Worth(GOOD), lambda _: Experience(float(rng.geometric(0.4) - 1), 0.7), 400)
    assert kinds.count("draft") > 380  # mean 1.5 tokens for 0.7 seconds


@pytest.mark.parametrize("total", [0.1, 0.7, 2.0, 6.5])
def test_geometric_ratio(total):
    ratio = geometric_ratio(total, 7)
    assert (ratio ** np.arange(1, 8)).sum() == pytest.approx(total, rel=1e-6)


def best_depth_by_hand(tokens, nodes, draft_s, verify_s, price):
    values = []
    for depth in range(1, len(tokens) + 1):
        seconds = draft_s[depth + 1] + np.interp(1 + nodes[:depth].sum(), np.arange(len(verify_s)), verify_s)
        values.append(tokens[:depth].sum() - price * seconds)
    return int(np.argmax(values)) + 1


@pytest.mark.parametrize("price", [0.5, 2.0, 8.0])
def test_depth_against_brute_force(price):
    draft_s, verify_s = 0.1 + 0.02 * np.arange(17), 1 + 0.05 * np.arange(200)
    for tokens in (0.5, 2.0, 6.0):
        profile = DepthProfile(15, tokens, 12)
        by_hand = best_depth_by_hand(profile.tokens, profile.nodes, draft_s, verify_s, price)
        assert profile.best_depth(draft_s, verify_s, price) == max(by_hand, 2)


def test_depth_follows_what_is_bought_and_grows_again():
    draft_s, verify_s = 0.1 + 0.05 * np.arange(17), 1 + 0.02 * np.arange(200)
    profile, depths = DepthProfile(15, 2.0, 8), []
    for number in range(80):
        depth = profile.best_depth(draft_s, verify_s, 1.0)
        depths.append(depth)
        reached = min(depth, 1 if number < 40 else 15)
        profile.observe(np.arange(1, reached + 1), np.full(reached, 0.9 if number >= 40 else 0.2), depth)
    assert depths[39] <= 3 and depths[-1] == 15


def test_the_card():
    row = CARD["0"]
    assert acceptance_at(row, 0) == 1.0 and acceptance_at(row, 4) == pytest.approx(2.4)
    assert 2.4 < acceptance_at(row, 8) < 3.0 and acceptance_at(row, 1024) == 3.5
    assert row_for(CARD, 0.7) is CARD["0.8"] and row_for(CARD, 0.1) is CARD["0"]
    assert best_budget(row, lambda budget: 1 + 0.001 * budget) == 64
    assert best_budget(row, lambda budget: 1 + 0.2 * budget) in (2, 4)
