"""Openers: how the sampled sequences begin, tokenised once so that the training machine needs no tokenizer.

`python -m ddtree.training.openers --target FILE.gguf` reads `openers.txt`, fills its placeholders from the lists
below and writes `openers.json`. An opener is only a beginning; the target writes everything else.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

TEXT = Path(__file__).with_name("openers.txt")
JSON = Path(__file__).with_name("openers.json")

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"

# share of the sequences, and the share of those whose opener is empty (the target chooses the subject itself)
SHARES = {"code": 0.22, "word": 0.20, "math": 0.20, "general": 0.20, "writing": 0.13, "raw": 0.05}
EMPTY_SHARE = {"general": 0.5, "writing": 0.35}
FILLINGS = 12
QUOTES = ('"""', '."""', "'''", ' """', " '''")  # of docstrings: a stub whose docstring closes is a whole request

LISTS = {
    "name": "Anna Ben Carla David Elena Frank Grace Henry Isabel Jack Kate Leo Maria Noah Olivia Peter Rosa Sam Tina "
    "Victor Wendy Omar Priya Chen Yuki Amara Diego Fatima Ivan Lucy Mark Nina Tom Julia Alex Mike Emma Liam Sofia "
    "James Sarah John Mary Jane Bob Alice Janet Carlos Marcus Tanya Kevin Betty Jerry Mr. Mrs. Josh Claire Toby",
    "thing": "apples books pencils marbles cookies eggs oranges stickers cupcakes flowers toys cards coins bottles "
    "shirts tickets pizzas candies balloons chairs fish cats dogs trees boxes pages stamps bananas cakes pens",
    "place": "store market zoo farm school park library bakery beach museum office restaurant",
    "number": "2 3 4 5 6 7 8 9 10 12 15 16 18 20 24 25 30 36 40 45 48 50 60 75 80 90 100 120 150 200 240 500",
    "verb": "count find is sum remove get check sort filter max min reverse merge split is_valid encode decode compute "
    "rotate double flatten convert group largest smallest unique total has next parse replace same",
    "noun": "words numbers digits list string primes elements vowels array characters sum pairs evens index palindrome "
    "factorial fibonacci brackets dates strings substring sequence matrix duplicates letters median odd distance",
    "arg": "n s lst nums text arr numbers string words x a,b lst,k s,t",
    "topic": "photosynthesis gravity inflation evolution democracy climate_change machine_learning the_internet "
    "the_Roman_Empire electricity the_water_cycle vaccines black_holes supply_and_demand DNA the_solar_system "
    "artificial_intelligence World_War_II probability quantum_mechanics the_immune_system globalization blockchain",
}


def read_lines(text: str) -> list[tuple[str, str]]:
    """(category, opener with placeholders) of every line that is not a comment."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.split(":", 1) for line in lines]
    return [(category, opener.removeprefix(" ").replace("⏎", "\n")) for category, opener in pairs]


def fill(opener: str, rng: random.Random) -> str:
    """The opener with every placeholder replaced by a random entry of its list."""
    def choose(match: re.Match) -> str:
        return rng.choice(LISTS[match[1]].split()).replace("_" if match[1] == "topic" else "\0", " ")

    return re.sub(r"<(" + "|".join(LISTS) + ")>", choose, opener).replace("Mr.", "Mr. Lee").replace("Mrs.", "Mrs. Ray")


def expand(text: str, seed: int = 0) -> dict[str, list[str]]:
    """Category -> its openers, those with placeholders in `FILLINGS` versions."""
    rng = random.Random(seed)
    openers: dict[str, list[str]] = {category: [] for category in SHARES}
    for category, opener in read_lines(text):
        versions = [fill(opener, rng) for _ in range(FILLINGS)] if "<" in opener else [opener]
        openers[category] += dict.fromkeys(versions)
    return openers


def build(encode: Callable[[str], list[int]], text: str) -> dict:
    """What `openers.json` holds: the template's pieces and every opener as token ids."""
    (end,) = encode(END)
    openers = {category: [encode(opener) for opener in group] for category, group in expand(text).items()}
    return {
        "system_prefix": encode(SYSTEM + USER),
        "after_user": encode("\n" + ASSISTANT),
        "after_assistant": encode("\n" + USER),
        "end_id": end,
        "raw_prefix": encode("<|endoftext|>"),
        "stop_ids": [end, *encode("<|endoftext|>")],
        "docstring_ids": sorted({encode(prefix + quotes)[-1] for prefix in ("x", " ", "\n   ", "\n    ") for quotes in QUOTES}),
        "shares": SHARES,
        "empty_shares": EMPTY_SHARE,
        "openers": openers,
    }


def load() -> dict:
    """The shipped openers."""
    return json.loads(JSON.read_text(encoding="utf-8"))


def main() -> None:
    from ddtree.text.tokenizer import Tokenizer

    parser = argparse.ArgumentParser(description="tokenise the openers of the sampled training data")
    parser.add_argument("--target", required=True, help="GGUF or folder whose tokenizer the target uses")
    tokenizer = Tokenizer.load(parser.parse_args().target)
    JSON.write_text(json.dumps(build(tokenizer.encode, TEXT.read_text(encoding="utf-8")), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
