"""A small prose and a tokenizer trained on it, on the repository's own pages and on problems."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ddtree.text.tokenizer import Tokenizer
from recipes.hybrid_tiny import problems, tokenizer
from recipes.hybrid_tiny.prose import Prose

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def prose() -> Prose:
    return Prose(
        (
            (("Please explain why the sky is blue.", "Air scatters blue light more than red.\n\nSo the sky looks blue."),),
            (("hello", "Hello! How can I help you?"), ("Write a poem about rain.", "Rain falls\non the walls.")),
            (
                ("What is a bee?", "A bee is an insect."),
                ("And a wasp?", "It is a relative of the bee."),
                ("Thanks, friend.", "You are welcome!"),
            ),
            (("Give me two tips for a good night's sleep?", "1. Go to bed early.\n2. Keep the room dark."),),
        ),
        ("The river runs past the old mill and on to the sea.", "Once there was a cat who liked the sun."),
    )


@pytest.fixture(scope="session")
def tokenizer_folder(prose, tmp_path_factory) -> Path:
    rng = random.Random(0)
    # LICENSE and the pages are English enough to fill the vocabulary.
    texts = [path.read_text(encoding="utf-8") for path in [ROOT / "README.md", ROOT / "LICENSE", *sorted(ROOT.glob("docs/*.md"))]]
    for problem in (problems.draw(rng, held_out=False) for _ in range(1500)):
        texts.append(f"{problem.question}\n{problem.thought}\n{problem.reply}")
    folder = tmp_path_factory.mktemp("hybrid-tiny")
    tokenizer.write(tokenizer.train(texts), folder)
    return folder


@pytest.fixture(scope="session")
def served(tokenizer_folder) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)
