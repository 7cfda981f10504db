"""The embedded pair on real weights: what a user would see, against plain decoding and transformers."""

import pytest

from ddtree.budget.card import acceptance_at, best_budget
from ddtree.sampling.params import SamplingParams

pytestmark = pytest.mark.real

BUDGETS = [1, 2, 7, 15, 16, 32, 64, 128, 256, 512, 1024]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


def test_equal_to_transformers_and_at_every_budget(pair, transformers_greedy, evaluation_prompts):
    """CI's part of the equality: few prompts, every budget."""
    prompt = pair.chat_ids(evaluation_prompts[2])
    plain = list(pair.answer(prompt, 0, 24).token_ids)
    assert plain == transformers_greedy(prompt, 24)
    for budget in BUDGETS:
        assert list(pair.answer(prompt, budget, 24).token_ids) == plain, f"budget {budget}"


@pytest.mark.long
def test_two_hundred_greedy_tokens_are_those_of_transformers(pair, transformers_greedy):
    prompt = tuple(pair.tokenizer.encode("The history of the city begins in"))
    assert list(pair.answer(prompt, 8, 200).token_ids) == transformers_greedy(prompt, 200)


def test_sampled_equal_at_every_budget(pair, evaluation_prompts):
    prompt = pair.chat_ids(evaluation_prompts[1])
    plain = pair.answer(prompt, 0, 20, SAMPLED, seed=5).token_ids
    for budget in (1, 2, 7, 16, 64, 256):
        assert pair.answer(prompt, budget, 20, SAMPLED, seed=5).token_ids == plain, f"budget {budget}"
    assert pair.answer(prompt, 16, 20, SAMPLED, seed=6).token_ids != plain


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(10))
def test_long_equality(pair, transformers_greedy, evaluation_prompts, number):
    prompt = pair.chat_ids(evaluation_prompts[number])
    plain = list(pair.answer(prompt, 0, 128).token_ids)
    assert plain == transformers_greedy(prompt, 128)
    sampled = pair.answer(prompt, 0, 128, SAMPLED, seed=number).token_ids
    for budget in BUDGETS if number < 2 else (4, 16, 64):
        assert list(pair.answer(prompt, budget, 128).token_ids) == plain, f"budget {budget}"
        assert pair.answer(prompt, budget, 128, SAMPLED, seed=number).token_ids == sampled, f"budget {budget}"


def test_the_shipped_drafter_drafts(pair, evaluation_prompts):
    """Features off by a layer or from the wrong rows are lossless and invisible but for this: acceptance near 1."""
    rounds = emitted = 0
    for text in evaluation_prompts[:3]:
        stats = pair.answer(pair.chat_ids(text), 16, 32).stats
        rounds += stats.decode_rounds
        emitted += sum(length * count for length, count in stats.acceptance_histogram.items())
    assert emitted / rounds > 2.2


@pytest.mark.long
def test_budgets_alternate_within_a_conversation(pair):
    turns, history = ["Name three fruits.", "Which of them is red?", "Thank you."], []
    from ddtree.text import render_chat

    for turn, budget in zip(turns, (16, 0, 64), strict=True):
        history.append({"role": "user", "content": turn})
        prompt = pair.tokenizer.encode(render_chat(pair.tokenizer, history), add_special_tokens=False)
        plain = pair.answer(prompt, 0, 16).token_ids
        assert pair.answer(prompt, budget, 16).token_ids == plain
        history.append({"role": "assistant", "content": pair.tokenizer.decode(list(plain))})


def test_the_first_impression_comes_from_the_card(pair):
    """With the shipped card a machine whose small trees are cheap prefers them, one whose rows are free a large one."""
    from ddtree.cli.loaded import acceptance_of

    card = acceptance_of(pair.source.drafter)
    assert 2 < acceptance_at(card["0"], 8) < acceptance_at(card["0"], 64)
    assert best_budget(card["0"], lambda budget: 1.3 + 0.1 * budget) in (4, 8)
    assert best_budget(card["0"], lambda budget: 1.3 + 0.001 * budget) >= 64
