"""Arithmetic and word problems with a worked thought and an answer that can be checked.

Operand pairs are split by a hash, not by a list: a pair that is held out never occurs in training, in either order, in
any operation, not even inside a multiplication.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations

from recipes.hybrid_tiny import phrasings, stories
from recipes.hybrid_tiny.columns import Worked, work

KINDS = ("addition", "subtraction", "multiplication", "two_step", "word")
SIGN_SHAPES = {"addition": "a + b", "subtraction": "a - b", "multiplication": "a × b"}
HELD_OUT_LOW, HELD_OUT_HIGH, HELD_OUT_ONE_IN = 10, 999, 40

# digits of the operands, and how often
SUM_DIGITS = {(2, 2): 28, (3, 2): 20, (2, 3): 12, (3, 3): 30, (1, 1): 3, (2, 1): 4, (1, 2): 2, (3, 1): 1}
PRODUCT_DIGITS = {(2, 2): 34, (2, 1): 14, (1, 2): 4, (3, 1): 14, (1, 3): 2, (3, 2): 16, (2, 3): 5, (3, 3): 9, (1, 1): 2}
NEGATIVE_SHARE = 0.1

Step = tuple[str, int, int]  # operator, left, right


@dataclass(frozen=True)
class Problem:
    """One problem; the last number of the reply is the answer."""

    kind: str
    question: str
    thought: str
    reply: str
    answer: int
    pairs: tuple[tuple[int, int], ...]  # operands of its steps


def is_held_out(a: int, b: int) -> bool:
    """Does this operand pair, in either order, belong to the held-out side? About 2.5 % of those in 10 … 999."""
    low, high = (a, b) if a <= b else (b, a)
    if low < HELD_OUT_LOW or high > HELD_OUT_HIGH:
        return False
    mixed = (low * 0x9E3779B1 ^ high * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 15) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 12) * 0x297A2D39) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) % HELD_OUT_ONE_IN == 0


def draw(rng: random.Random, held_out: bool, kind: str | None = None) -> Problem:
    """A problem of `kind` (any, if None), of the held-out or of the training side; ValueError for an unknown kind."""
    kind = rng.choice(KINDS) if kind is None else kind
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    story = rng.choice(stories.load()) if kind == "word" else None
    shape = SIGN_SHAPES.get(kind) or (story.shape if story else rng.choice(phrasings.TWO_STEP))
    while True:
        numbers = draw_numbers(shape, story.ranges if story else None, rng)
        steps = steps_of(shape, numbers)
        if not _on_side(numbers, steps, held_out) or not _is_plain(kind, steps):
            continue
        worked = [work(*step) for step in steps]
        if held_out or not any(is_held_out(*pair) for work_ in worked for pair in work_.inner):
            return _problem(kind, shape, story, numbers, steps, worked, rng)


def draw_numbers(shape: str, ranges: dict[str, tuple[int, int]] | None, rng: random.Random) -> dict[str, int]:
    """Operands for the shape: from the story's ranges, or with the usual numbers of digits."""
    if ranges:
        return {name: rng.randint(*ends) for name, ends in ranges.items()}
    if shape in ("a + b", "a - b", "a × b"):
        table = PRODUCT_DIGITS if "×" in shape else SUM_DIGITS
        sizes = rng.choices(list(table), table.values())[0]
        a, b = (_of_size(size, rng) for size in sizes)
        if shape == "a - b" and (a < b) != (rng.random() < NEGATIVE_SHARE):
            a, b = b, a
        return {"a": a, "b": b}
    if "(" in shape:
        sizes, small = (rng.choice((2, 2, 3)), rng.choice((2, 2, 3)), 1), True
    elif "×" in shape:
        sizes, small = rng.choice(((2, 1, 2), (2, 1, 3), (1, 2, 2), (2, 2, 2), (2, 2, 3), (3, 1, 3), (3, 1, 2))), False
    else:
        sizes, small = tuple(rng.choice((2, 2, 3)) for _ in "abc"), False
    a, b, c = (_of_size(size, rng) for size in sizes)
    return {"a": a, "b": b, "c": max(c, 2) if small else c}


def steps_of(shape: str, numbers: dict[str, int]) -> list[Step]:
    """The operations in order, operands as numbers; a negative intermediate result appears as it is."""
    first, second, _ = phrasings.SHAPES[shape]
    values = dict(numbers)
    steps = []
    for step in filter(None, (first, second)):
        operator, left, right = step[0], values[step[1]], values[step[2]]
        steps.append((operator, left, right))
        values["r"] = _result(steps[-1])
    return steps


def _on_side(numbers: dict[str, int], steps: list[Step], held_out: bool) -> bool:
    """Held out: every pair that can be is, and there is one. Training: none is, of the steps or of the question's numbers."""
    if not held_out:
        # `26 + 214 - 161` reads as if 214 and 161 were a pair
        pairs = [*combinations(numbers.values(), 2), *((left, right) for _, left, right in steps)]
        return not any(is_held_out(*pair) for pair in pairs)
    eligible = [pair for _, *pair in steps if min(pair) >= HELD_OUT_LOW and max(pair) <= HELD_OUT_HIGH]
    return bool(eligible) and all(is_held_out(*pair) for pair in eligible)


def _is_plain(kind: str, steps: list[Step]) -> bool:
    """No step from a negative number; stories and two steps end at 2 or more (a plural), two steps also at 0 and 1."""
    if any(left < 0 or right < 0 for _, left, right in steps):
        return False
    result = _result(steps[-1])
    return result >= 2 if kind == "word" else result >= 0 or kind == "subtraction"


def _result(step: Step) -> int:
    operator, left, right = step
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def _of_size(size: int, rng: random.Random) -> int:
    return rng.randint(10 ** (size - 1), 10**size - 1)


def _problem(
    kind: str,
    shape: str,
    story: stories.Story | None,
    numbers: dict[str, int],
    steps: list[Step],
    worked: list[Worked],
    rng: random.Random,
) -> Problem:
    result = worked[-1].result
    if story:
        question, reply = stories.tell(story, numbers, result, rng)
    else:
        question, reply = phrasings.ask(shape, numbers, rng), phrasings.answer(shape, numbers, result, rng)
    lines = [line for work_ in worked for line in work_.lines]
    if kind in ("two_step", "word"):
        lines.insert(0, phrasings.SHAPES[shape][2].format_map(numbers))
    pairs = tuple((left, right) for _, left, right in steps)
    return Problem(kind, question, "\n".join(lines), reply, result, pairs)
