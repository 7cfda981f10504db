"""The embedded hybrid pair: right sums, and the same tokens at every budget, in chats, after stops and aborts, sampled too."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
import torch

from benchmarks.accuracy import read_answer
from ddtree.caches.recurrent import RecurrentCache
from ddtree.cli.loaded import load
from ddtree.engine.request import Request
from ddtree.models import stack
from ddtree.sampling.params import SamplingParams
from ddtree.sources import resolve
from ddtree.text import Tokenizer, render_chat

BUDGETS = (1, 2, 7, 15, 16, 32, 64, 128, 256, 512, 1024)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
QUESTIONS = ("What is 478 + 356?", "How much is 47 times 38?", "Tom has 23 pens and buys 58 more. How many pens does he have now?")


class Pair:
    """hybrid-tiny and its drafter in float32 on the CPU."""

    def __init__(self):
        self.source = resolve("hybrid-tiny")
        self.tokenizer = Tokenizer.load(self.source.target)
        self.eos = frozenset(self.tokenizer.eos_token_ids)
        self.engine = self.new_engine()

    def new_engine(self):
        return load(Namespace(device="cpu", dtype="float32", max_context=4096), self.source)

    def prompt(self, messages, thinking: bool | None = True) -> tuple[int, ...]:
        rendered = render_chat(self.tokenizer, messages, enable_thinking=thinking)
        return tuple(self.tokenizer.encode(rendered, add_special_tokens=False))

    def ask(self, text: str, thinking: bool = True) -> tuple[int, ...]:
        return self.prompt([{"role": "user", "content": text}], thinking)

    def request(self, prompt, budget: int, max_tokens: int = 200, sampling=None, seed: int = 5) -> Request:
        return Request(prompt, max_tokens, sampling or SamplingParams(), seed, tree_budget=budget, eos_token_ids=self.eos)

    def answer(self, prompt, budget: int, max_tokens: int = 200, sampling=None):
        return self.engine.generate(self.request(prompt, budget, max_tokens, sampling))

    def text(self, token_ids) -> str:
        return self.tokenizer.decode(list(token_ids))


@pytest.fixture(scope="module")
def hybrid() -> Pair:
    return Pair()


@pytest.fixture(scope="module")
def items(hybrid) -> list[dict]:
    return [json.loads(line) for line in (hybrid.source.target / "items.jsonl").read_text(encoding="utf-8").splitlines()]


def test_it_is_one_small_offline_package(hybrid):
    folders = (hybrid.source.target, hybrid.source.drafter)
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= 16_000_000
    assert hybrid.engine.target.model.config.layer_types == (*["linear_attention"] * 3, "full_attention") * 2


def test_the_held_out_items_share_no_pair_with_training(items):
    from recipes.hybrid_tiny.problems import is_held_out

    assert len(items) == 500
    pairs = [pair for item in items for pair in item["pairs"] if all(10 <= operand <= 999 for operand in pair)]
    assert len(pairs) > 500 and all(is_held_out(*pair) for pair in pairs)


def test_thinking_gets_sums_right_plain_and_with_trees(hybrid, items):
    chosen = items[::71]
    right = 0
    for item in chosen:
        prompt = hybrid.ask(item["question"])
        plain, tree = hybrid.answer(prompt, 0, 500), hybrid.answer(prompt, 64, 500)
        assert tree.token_ids == plain.token_ids, item["question"]
        assert tree.stats.mean_acceptance_length > 3
        right += read_answer(hybrid.text(plain.token_ids)) == item["answer"]
    assert right >= 0.9 * len(chosen)


@pytest.mark.parametrize("sampling", [None, pytest.param(SAMPLED, marks=pytest.mark.long)], ids=["greedy", "sampled"])
def test_every_budget_writes_what_plain_decoding_writes(hybrid, sampling):
    prompt = hybrid.ask("Write a short story about a dog.")
    plain = hybrid.answer(prompt, 0, 48, sampling).token_ids
    for budget in BUDGETS:
        assert hybrid.answer(prompt, budget, 48, sampling).token_ids == plain, budget


def test_a_flattened_tree_fails_the_same_test(hybrid, monkeypatch):
    class Flattened(RecurrentCache):
        """What a plain cache does: the tree's rows are consecutive tokens."""

        def stage_conv(self, x, weight, bias, parents):
            return super().stage_conv(x, weight, bias, None)

        def stage(self, query, key, value, g, beta, ancestor_mask):
            return super().stage(query, key, value, g, beta, None)

    prompt = hybrid.ask(QUESTIONS[1])
    plain = hybrid.answer(prompt, 0, 60).token_ids
    monkeypatch.setattr(stack, "RecurrentCache", Flattened)
    assert hybrid.answer(prompt, 0, 60).token_ids == plain  # nothing shows without a tree
    assert hybrid.answer(prompt, 64, 60).token_ids != plain


@pytest.mark.parametrize(
    "sampling, budgets",
    [(None, (16, 0, 64)), pytest.param(SAMPLED, (1024, 0, 7), marks=pytest.mark.long)],
    ids=["greedy", "sampled"],
)
def test_three_turns_at_alternating_budgets(hybrid, sampling, budgets):
    def conversation(budgets):
        messages, written = [], []
        for question, budget in zip(QUESTIONS, budgets, strict=True):
            messages.append({"role": "user", "content": question})
            answer = hybrid.answer(hybrid.prompt(messages), budget, 260, sampling)
            written.append(answer.token_ids)
            thought, _, content = hybrid.text(answer.token_ids).partition("</think>")
            messages.append({"role": "assistant", "content": content.strip(), "reasoning_content": thought.strip()})
        return written, messages

    plain, messages = conversation((0, 0, 0))
    assert conversation(budgets)[0] == plain
    if sampling is None:
        assert [read_answer(message["content"]) for message in messages[1::2]] == [834, 1786, 81]


def test_eos_inside_an_accepted_run(hybrid):
    trimmed = 0
    for question in QUESTIONS:
        prompt = hybrid.ask(question)
        plain = hybrid.answer(prompt, 0, 300)
        for budget in (16, 64):
            tree = hybrid.answer(prompt, budget, 300)
            assert tree.token_ids == plain.token_ids and tree.finish_reason == "stop"
            assert tree.token_ids[-1] in hybrid.eos and not hybrid.eos & set(tree.token_ids[:-1])
            trimmed += tree.stats.trimmed_tokens
    assert trimmed > 0  # some round went past the end and was cut there


def test_abort_and_go_on(hybrid):
    prompts = [hybrid.ask(question) for question in QUESTIONS]
    alone = [hybrid.answer(prompt, 0, 80).token_ids for prompt in prompts]
    engine = hybrid.engine
    for prompt, expected in zip(prompts, alone, strict=True):
        abandoned = engine.add(hybrid.request(prompt, 64, 80))
        for _ in range(3):
            engine.step()
        engine.abort(abandoned)
        assert engine.generate(hybrid.request(prompt, 64, 80)).token_ids == expected
    assert not engine.has_work


def test_thinking_off_answers_at_once(hybrid):
    for question in (QUESTIONS[0], "What is the capital of France?"):
        prompt = hybrid.ask(question, thinking=False)
        plain, tree = hybrid.answer(prompt, 0, 80), hybrid.answer(prompt, 64, 80)
        assert tree.token_ids == plain.token_ids and plain.finish_reason == "stop"
        assert "think" not in hybrid.text(plain.token_ids)


def test_prose_carries_a_thought_and_reads_as_english(hybrid):
    answer = hybrid.text(hybrid.answer(hybrid.ask("What is the capital of France?"), 64).token_ids)
    thought, closed, content = answer.partition("</think>")
    assert closed and len(thought.split()) >= 5 and "Paris" in content
    prompt = tuple(hybrid.tokenizer.encode("The capital of France is"))
    assert "Paris" in hybrid.text(hybrid.answer(prompt, 64, 8).token_ids)


@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_long_equality_over_the_prompt_sets(hybrid, evaluation_prompts, number):
    for thinking in (True, False):
        prompt = hybrid.ask(evaluation_prompts[number], thinking)
        for sampling in (None, SAMPLED):
            plain = hybrid.answer(prompt, 0, 96, sampling).token_ids
            for budget in BUDGETS:
                assert hybrid.answer(prompt, budget, 96, sampling).token_ids == plain, (thinking, budget)


def test_transformers_reads_the_same_folder(hybrid):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(hybrid.source.target, dtype=torch.float32).eval()
    prompt = hybrid.ask(QUESTIONS[1])
    ours = hybrid.answer(prompt, 0, 200).token_ids
    with torch.inference_mode():
        chosen = theirs(torch.tensor([[*prompt, *ours[:-1]]])).logits[0, len(prompt) - 1 :].argmax(-1)
    assert tuple(chosen.tolist()) == ours
