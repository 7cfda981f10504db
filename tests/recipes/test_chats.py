"""Samples rendered by hand equal the template's rendering, and their classes mark what the model is to learn."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from ddtree.text.chat import render_chat
from recipes.hybrid_tiny import chats
from recipes.hybrid_tiny.chats import ANSWER, DOCUMENT, FORCED, Chat, Encoder, Mix


@pytest.fixture(scope="module")
def drawn(prose) -> list[Chat]:
    rng = random.Random(5)
    return [one for one in (chats.draw_chat(prose, Mix(), rng) for _ in range(300)) if isinstance(one, Chat)]


@pytest.fixture(scope="module")
def encoder(tokenizer_folder) -> Encoder:
    return Encoder(Backend.from_file(str(tokenizer_folder / "tokenizer.json")))


def test_the_mix_holds_every_form(drawn):
    assert {len(chat.turns) for chat in drawn} == {1, 2, 3}
    assert {chat.thinking for chat in drawn} == {True, False}
    assert {chat.system is None for chat in drawn} == {True, False}


def test_hand_rendering_equals_the_template(drawn, served):
    for chat in drawn:
        whole = chats.messages(chat)
        assert chats.render(chat) + "\n" == render_chat(served, whole, add_generation_prompt=False)
        prompt = render_chat(served, whole[:-1], enable_thinking=chat.thinking)
        assert "".join(piece.text for piece in chats.prompt_pieces(chat)) == prompt


def test_pieces_encode_to_what_the_whole_encodes_to(drawn, served, encoder):
    pieces = [[*chats.prompt_pieces(chat), *chats.answer_pieces(chat)] for chat in drawn]
    for chat, (tokens, classes) in zip(drawn, encoder.encode(pieces), strict=True):
        assert tokens.dtype == np.uint16 and classes.dtype == np.uint8
        assert tokens.tolist() == served.encode(chats.render(chat))
        prompt = render_chat(served, chats.messages(chat)[:-1], enable_thinking=chat.thinking)
        assert tokens[: len(served.encode(prompt))].tolist() == served.encode(prompt)


def test_classes_mark_the_answer_the_documents_and_the_template(drawn, served, encoder):
    pieces = [[*chats.prompt_pieces(chat), *chats.answer_pieces(chat)] for chat in drawn]
    for chat, (tokens, classes) in zip(drawn, encoder.encode(pieces), strict=True):
        def text_of(token_class, tokens=tokens, classes=classes):
            return served.decode(tokens[classes == token_class], skip_special_tokens=False)

        last = chat.turns[-1]
        thought = f"{last.thought}\n</think>\n\n" if chat.thinking else ""
        assert text_of(ANSWER) == f"{thought}{last.reply}<|im_end|>"
        earlier = "".join(f"{turn.question}{turn.reply}<|im_end|>" for turn in chat.turns[:-1])
        assert text_of(DOCUMENT) == earlier + last.question
        assert text_of(FORCED).endswith("<|im_start|>assistant\n<think>\n" + ("" if chat.thinking else "\n</think>\n\n"))


def test_samples_and_prompts(prose, encoder, served):
    samples = chats.make_samples(200, prose, Mix(), encoder, random.Random(6))
    assert len(samples) == 200 and all(0 < len(tokens) <= chats.MAX_TOKENS for tokens, _ in samples)
    raw = [(tokens, classes) for tokens, classes in samples if tokens[-1] == served.backend.token_to_id("<|endoftext|>")]
    assert raw and all(classes[0] == DOCUMENT and (classes[1:] == ANSWER).all() for _, classes in raw)
    prompts = [served.decode(prompt, skip_special_tokens=False) for prompt in chats.make_prompts(200, prose, Mix(), encoder, random.Random(7))]
    chat_prompts = [prompt for prompt in prompts if prompt.startswith("<|im_start|>")]
    assert 0 < len(chat_prompts) < 200
    assert all(prompt.endswith(("<think>\n", "<think>\n\n</think>\n\n")) for prompt in chat_prompts)
    assert not any("<|" in prompt for prompt in prompts if prompt not in chat_prompts)


def test_the_same_seed_makes_the_same_samples(prose, encoder):
    first, second = (chats.make_samples(50, prose, Mix(), encoder, random.Random("0-samples-0")) for _ in range(2))
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(first, second, strict=True))


def test_shares_beyond_one_are_refused():
    with pytest.raises(ValueError, match="must add up to 1 or less, got 1.3"):
        Mix(arithmetic_thinking=0.9, arithmetic_direct=0.12)
