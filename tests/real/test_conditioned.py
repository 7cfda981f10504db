"""The shipped adapter: the same tokens as plain decoding, and longer acceptance than the same drafter without it."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree.engine.loading import load_engine
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from ddtree.sources import resolve
from ddtree.text import Tokenizer, render_chat

QUESTIONS = ("What is 17 + 25? Explain.", "List four fruits and a use of each.")
TOKENS = 24
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95)

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def pair():
    source = resolve("smollm2")
    return load_engine(source.target, source.drafter, device="cpu", max_context=512), Tokenizer.load(source.target)


def ask(pair, question: str, budget: int, sampling: SamplingParams, scoring=None):
    engine, tokenizer = pair
    text = render_chat(tokenizer, [{"role": "user", "content": question}])
    prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
    return engine.generate(Request(prompt, TOKENS, sampling, seed=7, tree_budget=budget, scoring=scoring))


@pytest.mark.parametrize("sampling", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.long)], ids=["greedy", "sampled"])
def test_it_writes_what_the_target_writes_and_accepts_more(pair, sampling):
    lengths = {"factorised": [], "conditioned": []}
    for question in QUESTIONS:
        expected = ask(pair, question, 0, sampling).token_ids
        for scoring, found in lengths.items():
            emission = ask(pair, question, 16, sampling, scoring)
            assert emission.token_ids == expected, f"{question} {scoring}"
            assert emission.stats.scoring == scoring
            found.append(emission.stats.output_tokens / emission.stats.decode_rounds)
    if sampling.greedy:
        assert np.mean(lengths["conditioned"]) > np.mean(lengths["factorised"])


@pytest.mark.long
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 15, 31, 64, 127, 256, 1024])
def test_at_every_budget(pair, budget):
    for sampling in (GREEDY, SAMPLED):
        assert ask(pair, QUESTIONS[0], budget, sampling).token_ids == ask(pair, QUESTIONS[0], 0, sampling).token_ids
