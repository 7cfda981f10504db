"""How a sum is asked and answered in words: many phrasings, so that the form of the question carries no weight.

A shape is an expression over a, b, c, for instance `a × b - c`; `SHAPES` says which steps it takes, in what order.
"""

from __future__ import annotations

import random
import re

# shape -> (first step, second step, the plan); r is the first step's result
SHAPES = {
    "a + b": (("+", "a", "b"), None, "Add {a} and {b}."),
    "a - b": (("-", "a", "b"), None, "Take {b} from {a}."),
    "a × b": (("×", "a", "b"), None, "Multiply {a} by {b}."),
    "a + b + c": (("+", "a", "b"), ("+", "r", "c"), "First {a} + {b}, then plus {c}."),
    "a + b - c": (("+", "a", "b"), ("-", "r", "c"), "First {a} + {b}, then minus {c}."),
    "a - b + c": (("-", "a", "b"), ("+", "r", "c"), "First {a} - {b}, then plus {c}."),
    "a - b - c": (("-", "a", "b"), ("-", "r", "c"), "First {a} - {b}, then minus {c}."),
    "a × b + c": (("×", "a", "b"), ("+", "r", "c"), "First {a} × {b}, then plus {c}."),
    "a × b - c": (("×", "a", "b"), ("-", "r", "c"), "First {a} × {b}, then minus {c}."),
    "c + a × b": (("×", "a", "b"), ("+", "c", "r"), "First {a} × {b}, then {c} plus that."),
    "c - a × b": (("×", "a", "b"), ("-", "c", "r"), "First {a} × {b}, then {c} minus that."),
    "(a + b) × c": (("+", "a", "b"), ("×", "r", "c"), "First {a} + {b}, then times {c}."),
    "(a - b) × c": (("-", "a", "b"), ("×", "r", "c"), "First {a} - {b}, then times {c}."),
}
TWO_STEP = tuple(shape for shape, (_, second, _) in SHAPES.items() if second)

FRAMES = (
    "What is {e}?", "What is {e}?", "What's {e}?", "what is {e}", "{e} = ?", "{e} =", "{e}", "{e}?", "Calculate {e}.",
    "calculate {e}", "Please calculate {e}.", "How much is {e}?", "how much is {e}", "Work out {e}.", "Compute {e}.",
    "Can you work out {e}?", "Could you compute {e} for me?", "Please work out {e} for me.", "Solve {e}.", "Find {e}.",
    "Evaluate {e}.", "Tell me what {e} is.", "What does {e} equal?", "What does {e} come to?", "What do you get for {e}?",
    "Give me the result of {e}.", "What is the result of {e}?", "What is the value of {e}?", "Hi! What is {e}?",
    "Hello, can you tell me {e}?", "Quick question: what is {e}?", "Do you know what {e} is?", "Help me with {e}.",
    "Determine {e}.", "I need the answer to {e}.", "Now {e}, please.", "And what is {e}?", "{e}, please.",
)  # fmt: skip
SPOKEN = {
    "a + b": (
        "Add {a} and {b}.", "Add {b} to {a}.", "What is the sum of {a} and {b}?", "Find the sum of {a} and {b}.",
        "What do {a} and {b} make together?", "Which number is {b} more than {a}?",
    ),
    "a - b": (
        "Subtract {b} from {a}.", "Take {b} away from {a}.", "What is left if you take {b} from {a}?",
        "What is {a} less {b}?", "Which number is {b} less than {a}?",
    ),
    "a × b": (
        "Multiply {a} by {b}.", "Multiply {a} and {b}.", "What is the product of {a} and {b}?",
        "Find the product of {a} and {b}.", "How much is {a} multiplied by {b}?",
    ),
    "a + b + c": ("Add {a}, {b} and {c}.", "What is the sum of {a}, {b} and {c}?", "Add {a} and {b}, then add {c}."),
    "a + b - c": ("Add {a} and {b}, then subtract {c}.", "Take {c} away from the sum of {a} and {b}."),
    "a - b + c": ("Subtract {b} from {a}, then add {c}.", "Take {b} away from {a} and add {c}."),
    "a - b - c": ("Subtract {b} from {a}, then subtract {c}.", "Take {b} and then {c} away from {a}."),
    "a × b + c": ("Multiply {a} by {b}, then add {c}.", "Add {c} to the product of {a} and {b}."),
    "a × b - c": ("Multiply {a} by {b}, then subtract {c}.", "Subtract {c} from the product of {a} and {b}."),
    "c + a × b": ("To {c} add the product of {a} and {b}.",),
    "c - a × b": ("From {c} take the product of {a} and {b}.", "How much is {c} less the product of {a} and {b}?"),
    "(a + b) × c": ("Add {a} and {b}, then multiply by {c}.", "Multiply the sum of {a} and {b} by {c}."),
    "(a - b) × c": ("Subtract {b} from {a}, then multiply by {c}.", "Take {b} from {a} and multiply the result by {c}."),
}  # fmt: skip
SIGNS = {"+": ("+", "+", "plus"), "-": ("-", "-", "minus"), "×": ("*", "x", "×", "times")}
REPLIES = (
    "{e} = {n}.", "{e} = {n}.", "{e} = {n}", "{e} is {n}.", "The answer is {n}.", "The result is {n}.", "It is {n}.",
    "That is {n}.", "{n}", "{n}.", "That makes {n}.", "You get {n}.", "The answer: {n}",
)  # fmt: skip
SPOKEN_SHARE, CLOSE_SHARE = 0.2, 0.12


def expression(shape: str, numbers: dict[str, int]) -> str:
    """`(a + b) × c` with its numbers."""
    return re.sub(r"[abc]", lambda name: str(numbers[name[0]]), shape)


def ask(shape: str, numbers: dict[str, int], rng: random.Random) -> str:
    """One of the phrasings; signs or words, wide or close."""
    if rng.random() < SPOKEN_SHARE:
        return rng.choice(SPOKEN[shape]).format_map(numbers)
    signs = {sign: rng.choice(names) for sign, names in SIGNS.items()}
    if "(" in shape:  # words cannot say the brackets
        signs = {sign: rng.choice(names[:-1]) for sign, names in SIGNS.items()}
    written = " ".join(signs.get(part) or expression(part, numbers) for part in shape.split(" "))
    if rng.random() < CLOSE_SHARE and not any(name in written for name in ("plus", "minus", "times")):
        written = written.replace(" ", "")
    return rng.choice(FRAMES).format(e=written)


def answer(shape: str, numbers: dict[str, int], result: int, rng: random.Random) -> str:
    """The answer's sentence; its last number is the result."""
    return rng.choice(REPLIES).format(e=expression(shape, numbers), n=result)
