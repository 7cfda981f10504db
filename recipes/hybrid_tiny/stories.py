"""Word problems from the templates in stories.txt: names, objects and numbers filled in, plurals right."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from recipes.hybrid_tiny.phrasings import SHAPES

TEXT = Path(__file__).with_name("stories.txt")
SHE = "Anna Carla Elena Grace Isabel Kate Maria Olivia Rosa Tina Wendy Priya Amara Fatima Lucy Nina Julia Emma Sofia Zoe"
HE = "Ben David Frank Henry Jack Leo Noah Peter Sam Victor Omar Diego Ivan Mark Tom Alex Mike Liam James Paul"
PRONOUNS = {"he": ("she", "he"), "him": ("her", "him"), "his": ("her", "his")}
THINGS = (
    "apple/apples book/books pencil/pencils marble/marbles egg/eggs orange/oranges sticker/stickers card/cards coin/coins "
    "bottle/bottles ticket/tickets candle/candles button/buttons stamp/stamps pen/pens cup/cups toy/toys brush/brushes "
    "berry/berries potato/potatoes tomato/tomatoes cherry/cherries peach/peaches shell/shells bead/beads brick/bricks "
    "cake/cakes flower/flowers scarf/scarves knife/knives spoon/spoons glove/gloves photo/photos nail/nails"
)
BOXES = "box/boxes bag/bags basket/baskets crate/crates jar/jars shelf/shelves tray/trays"


@dataclass(frozen=True)
class Story:
    """One template."""

    shape: str
    ranges: dict[str, tuple[int, int]]  # of each number, both ends included
    question: str
    reply: str


@cache
def load() -> tuple[Story, ...]:
    """The templates; ValueError naming the line that is none."""
    stories = []
    for number, line in enumerate(TEXT.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#"):
            continue
        shape, *ranges, question, reply = (part.strip() for part in line.split(" | "))
        if shape not in SHAPES or len(ranges) != 3:
            raise ValueError(f"{TEXT.name} line {number}: expected a known shape and three ranges, got {line!r}")
        ends = {name: tuple(map(int, text.split("-"))) for name, text in zip("abc", ranges, strict=True) if text != "-"}
        stories.append(Story(shape, ends, question, reply))
    return tuple(stories)


def tell(story: Story, numbers: dict[str, int], result: int, rng: random.Random) -> tuple[str, str]:
    """Question and answer of the story with these numbers."""
    is_he = rng.random() < 0.5
    # Friends of the other list, so that a pronoun says who is meant.
    first, second = (HE, SHE) if is_he else (SHE, HE)
    words = {"A": rng.choice(first.split()), "B": rng.choice(second.split())}
    words["thing"], words["things"] = rng.choice(THINGS.split()).split("/")
    words["box"], words["boxes"] = rng.choice(BOXES.split()).split("/")
    for word, forms in PRONOUNS.items():
        words[word] = forms[is_he]
        words[word.capitalize()] = forms[is_he].capitalize()
    filled = (re.sub(r"<(\w+)>", lambda name: words[name[1]], text) for text in (story.question, story.reply))
    question, reply = (text.format(**numbers, n=result) for text in filled)
    return question, reply
