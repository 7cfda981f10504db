"""No speed of nothing: short replies, loops, wrong tokens, fallbacks, warm caches and false counts are refused."""

import pytest

from ddtree.bench.validity import Rules, first_difference, inspect, is_loop
from tests.bench.outputs import drafted, plain

AUDIT = Rules(audit=lambda config, item_id: f"ddtree audit toy --budgets 0,{config}")


def answers(count=10, **spoiled):
    """`count` honest items; `spoiled` maps an item number to changes of the drafted output."""
    rows = {}
    for number in range(count):
        name = f"p{number}"
        rows[name] = {"0": plain(name), "8": drafted("8", name, **spoiled.get(name, {}))}
    return rows


def kinds(verdict):
    return [reason.kind for reason in verdict.reasons]


def test_honest_outputs_pass():
    verdict = inspect(answers(), Rules())
    assert not verdict.refused and not verdict.excluded and not verdict.near_ties


@pytest.mark.parametrize("length", [1, 3, 4, 7, 15])
def test_short_replies_refuse_and_ignore_eos_labels(length):
    rows = {
        f"p{i}": {"0": plain(f"p{i}", range(length)), "8": drafted("8", f"p{i}", range(length))}
        for i in range(4)
    }
    verdict = inspect(rows, AUDIT)
    assert kinds(verdict) == ["short"] and "4 of 4 prompts" in verdict.reasons[0].message
    assert verdict.reasons[0].plain_text == " ".join(map(str, range(length)))
    assert (
        "--ignore-eos" in verdict.reasons[0].remedy
        and verdict.reasons[0].audit == "ddtree audit toy --budgets 0,8"
    )
    forced = inspect(rows, Rules(ignore_eos=True))
    assert not forced.refused and set(forced.forced.values()) == {"short"}


def test_a_fifth_is_excluded_and_more_is_refused():
    short = {"p0": {"0": plain("p0", range(9)), "8": drafted("8", "p0", range(9))}}
    loop = {"p1": {"0": plain("p1", [1, 2] * 30), "8": drafted("8", "p1", [1, 2] * 30)}}
    verdict = inspect({**answers(10), **short, **loop}, Rules())
    assert not verdict.refused and verdict.excluded == {"p0": "short", "p1": "loop"}
    few = {**answers(5), **short, **loop}
    assert kinds(inspect(few, Rules())) == ["short", "loop"]


def test_loops():
    text = list(range(100))
    assert not is_loop(text) and not is_loop([1, 1, 1]) and not is_loop([])
    assert is_loop(text + [5] * 48) and is_loop(text + [5, 6, 7] * 16)
    assert is_loop(text + list(range(24)) * 2) and is_loop(text[:48] * 2) and is_loop([7] * 20)
    assert is_loop(text + [0] * 3 + text[-48:])
    assert not is_loop(text + [5] * 40)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("differs", {"token_ids": (*range(20), 99, *range(21, 40))}, "token 20"),
        ("fell_back", {"mode": "target_only", "reason": "no drafter is loaded"}, "no drafter"),
        ("fell_back", {"mode": None}, "ddtree"),
        ("fell_back", {"reason": "past the drafter's own context limit"}, "context limit"),
        ("fell_back", {"tree_budget": 4}, "tree budget 4"),
        ("fell_back", {"nodes_verified": 0}, "no node"),
        ("cached", {"cached_tokens": 7}, "7 prompt tokens"),
        ("counts", {"trimmed_tokens": 1}, "trimmed"),
        ("counts", {"histogram": {1: 39}}, "rounds"),
        ("counts", {"output_tokens": 41}, "41"),
    ],
)
def test_one_spoiled_output_refuses(kind, change, words):
    verdict = inspect(answers(p3=change), AUDIT)
    assert kinds(verdict) == [kind]
    reason = verdict.reasons[0]
    assert words in reason.message and reason.prompt_ids == ["p3"] and reason.configs == ["8"]
    assert reason.audit == "ddtree audit toy --budgets 0,8" and reason.text and reason.plain_text
    assert verdict.as_json()["refused"] is True


def test_a_shorter_output_differs():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 2]) == 2 and first_difference([0], [1]) == 0


def test_near_ties_are_listed_not_refused():
    rules = Rules(near_tie=lambda one, other, position: {"margin": 1e-5} if position == 20 else None)
    changed = (*range(20), 99, *range(21, 40))
    verdict = inspect(answers(p3={"token_ids": changed}), rules)
    assert not verdict.refused
    assert verdict.near_ties == [{"prompt_id": "p3", "config": "8", "position": 20, "margin": 1e-5}]
    assert kinds(inspect(answers(p3={"token_ids": tuple(range(1, 41))}), rules)) == ["differs"]


def test_plain_that_is_not_plain():
    rows = {"p": {"0": plain(mode="ddtree")}}
    assert kinds(inspect(rows, Rules())) == ["fell_back"]
