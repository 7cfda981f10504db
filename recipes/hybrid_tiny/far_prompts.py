"""Prompts far from what hybrid-tiny was trained on, beside sums: what its adapter has to know so that strangers' prompts gain too.

    python -m recipes.hybrid_tiny.far_prompts --target ddtree/embedded/hybrid-tiny --out DATA --number 60000

A request is one or a few of the drafter's openers (`ddtree/training/openers.txt`), placeholders filled: beginnings of code, word problems,
formulas, letters; or a function to go on with or a paragraph out of Python's standard library, with an opener before it or without.
Written are prompts.npy and prompt_offsets.npy, which `recipes.hybrid_tiny.write` lets the target answer.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np

from ddtree.text.tokenizer import Tokenizer
from ddtree.training import openers
from recipes.hybrid_tiny.chats import Encoder, Mix, make_prompts
from recipes.hybrid_tiny.library_text import library_text
from recipes.hybrid_tiny.prose import Prose

MIX = Mix(arithmetic_thinking=0.12, arithmetic_direct=0.08, prose_thinking=0.5, prose_direct=0.3, turns=(0.9, 0.1))
REQUESTS = 20_000
FROM_LIBRARY = 0.5  # of all requests; half of them functions
SHARES = {"code": 0.14, "word": 0.24, "math": 0.32, "general": 0.16, "writing": 0.09, "raw": 0.05}  # of the other requests
OPENERS = (1, 2, 4, 8, 16, 24, 32)  # of a request, drawn evenly: as short and as long as public prompts are


def far_prose(seed: int, number: int = REQUESTS) -> Prose:
    """Requests of one category each, or out of the library; their replies matter only where a chat has an earlier turn."""
    rng = random.Random(f"{seed}-far")
    groups = openers.read_lines(openers.TEXT.read_text(encoding="utf-8"))
    by_category: dict[str, list[str]] = {}
    for category, opener in groups:
        by_category.setdefault(category, []).append(opener)
    names = list(by_category)
    shares = [SHARES[name] for name in names]

    def text(category: str) -> str:
        return " ".join(openers.fill(rng.choice(by_category[category]), rng) for _ in range(rng.choice(OPENERS))).strip()

    beginnings, paragraphs = library_text()

    def quoted() -> str:
        before = openers.fill(rng.choice(by_category["code" if rng.random() < 0.5 else "general"]), rng) + "\n" if rng.random() < 0.5 else ""
        return before + (rng.choice(beginnings) if rng.random() < 0.5 else " ".join(rng.sample(paragraphs, rng.choice((1, 1, 2)))))

    chosen = rng.choices(names, shares, k=number)
    requests = (quoted() if rng.random() < FROM_LIBRARY else text(category) for category in chosen)
    return Prose(tuple(((request, text("general")),) for request in requests), ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the trained target, whose tokenizer is used")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--number", type=lambda text: int(float(text)), default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(Tokenizer.load(args.target).backend)
    prompts = make_prompts(args.number, far_prose(args.seed), MIX, encoder, random.Random(f"{args.seed}-far-prompts"))
    np.save(args.out / "prompts.npy", np.concatenate(prompts))
    np.save(args.out / "prompt_offsets.npy", np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])]))
    print(f"far_prompts: {len(prompts):,} prompts, {sum(map(len, prompts)):,} tokens", flush=True)


if __name__ == "__main__":
    main()
