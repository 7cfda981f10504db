"""The sums are right, line by line, and no held-out operand pair is seen in training."""

from __future__ import annotations

import random
import re
from itertools import combinations

import pytest

from recipes.hybrid_tiny import problems, stories
from recipes.hybrid_tiny.columns import work

WHOLE = re.compile(r"^(\d+) ([-+×]) (\d+) = (-?\d+)$", re.MULTILINE)
COLUMN = re.compile(r"^([-+×\d]+)=(\d+), write (\d+)(?:, (carry|borrow) (\d))?$", re.MULTILINE)
APPLY = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__}


def drawn(number: int, held_out: bool) -> list[problems.Problem]:
    rng = random.Random(1)
    return [problems.draw(rng, held_out, kind) for kind in problems.KINDS for _ in range(number)]


@pytest.mark.parametrize("operator", "+-×")
def test_worked_results_are_right(operator):
    rng = random.Random(2)
    edges = [0, 1, 9, 10, 99, 100, 101, 200, 305, 999, 1000]
    pairs = [(a, b) for a in edges for b in edges] + [(rng.randint(0, 9999), rng.randint(0, 999)) for _ in range(2000)]
    for left, right in pairs:
        worked = work(operator, left, right)
        assert worked.result == APPLY[operator](left, right)
        assert worked.lines[-1].endswith(f" = {worked.result}")


def test_every_line_of_a_thought_is_true():
    for problem in drawn(400, held_out=False):
        for left, operator, right, result in WHOLE.findall(problem.thought):
            assert APPLY[operator](int(left), int(right)) == int(result), problem.thought
        for terms, total, digit, note, noted in COLUMN.findall(problem.thought):
            assert eval(terms.replace("×", "*")) == int(total), problem.thought
            assert not note or (total[-1] == digit and (note == "borrow" or total[:-1] == noted)), problem.thought
        explained = sum(1 for line in problem.thought.split("\n") if WHOLE.match(line) or COLUMN.match(line))
        headers = sum(1 for line in problem.thought.split("\n") if re.fullmatch(r"\d+ [-+×] \d+", line))
        prose = [line for line in problem.thought.split("\n") if line.endswith(".")]
        assert explained + headers + len(prose) >= len(problem.thought.split("\n")) - 1, problem.thought


def test_the_reply_ends_with_the_answer_and_the_thought_with_its_line():
    for problem in drawn(400, held_out=False) + drawn(20, held_out=True):
        assert int(re.findall(r"-?\d+", problem.reply)[-1]) == problem.answer
        assert problem.thought.endswith(f" = {problem.answer}")
        assert not re.search(r"[<>{}]", problem.question + problem.reply), problem.question


def test_symbolic_questions_ask_for_the_answer():
    checked = 0
    for problem in drawn(300, held_out=False):
        written = re.search(r"[(]?\d+(?:\s*[-+*x×()]+\s*\d+[)]?)+", problem.question)
        if problem.kind == "word" or not written or re.search("[a-z]{2} [0-9]+ (plus|minus|times)|and|from", problem.question):
            continue
        if re.search("plus|minus|times", problem.question):
            continue
        assert eval(written[0].replace("x", "*").replace("×", "*")) == problem.answer, problem.question
        checked += 1
    assert checked > 300


def test_training_never_meets_a_held_out_pair():
    for problem in drawn(600, held_out=False):
        assert not any(problems.is_held_out(*pair) for pair in problem.pairs)
        asked = [int(number) for number in re.findall(r"\d+", problem.question)]
        assert not any(problems.is_held_out(*pair) for pair in combinations(asked, 2)), problem.question
        for left, _, right, _ in WHOLE.findall(problem.thought):
            assert not problems.is_held_out(int(left), int(right)), problem.thought


def test_held_out_problems_hold_out_all_their_pairs():
    for problem in drawn(20, held_out=True):
        in_range = [pair for pair in problem.pairs if all(10 <= operand <= 999 for operand in pair)]
        assert in_range
        assert all(problems.is_held_out(*pair) for pair in in_range)


def test_about_one_pair_in_forty_is_held_out_in_either_order():
    rng = random.Random(3)
    pairs = [(rng.randint(10, 999), rng.randint(10, 999)) for _ in range(40_000)]
    held_out = [problems.is_held_out(a, b) for a, b in pairs]
    assert held_out == [problems.is_held_out(b, a) for a, b in pairs]
    assert 0.022 < sum(held_out) / len(pairs) < 0.028
    assert not any(problems.is_held_out(a, b) for a in range(10) for b in range(1200))
    assert not any(problems.is_held_out(a, b) for a in range(10, 99) for b in (1000, 2345))


def test_subtractions_are_sometimes_negative():
    rng = random.Random(4)
    negative = sum(problems.draw(rng, False, "subtraction").answer < 0 for _ in range(2000))
    assert 120 < negative < 280


def test_every_story_tells_its_numbers():
    assert len(stories.load()) >= 40
    assert len({story.question for story in stories.load()}) == len(stories.load())
    for story in stories.load():
        numbers = {name: 40 + place for place, name in enumerate(story.ranges)}
        question, reply = stories.tell(story, numbers, 77, random.Random(0))
        assert all(str(number) in question for number in numbers.values()), story.question
        assert re.findall(r"\d+", reply)[-1] == "77"


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="kind must be one of addition.*'division'"):
        problems.draw(random.Random(0), False, "division")
