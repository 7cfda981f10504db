"""2,048 entries by Qwen's conventions, and a template that behaves as Qwen3.5's."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from ddtree.text.chat import render_chat, thought_state
from ddtree.text.parse import Thought
from recipes.hybrid_tiny import tokenizer
from recipes.hybrid_tiny.tokenizer import ADDED, VOCAB_SIZE

TEXTS = (
    "478 × 356 = 170168\n8×6=48, write 8, carry 4", "What is 47*38?  Don't say it's 1786.\n\n\nOK", "naïve café, 你好, 🙂 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHi!<|im_end|>",
)  # fmt: skip
ASK = [{"role": "user", "content": " What is 2 + 3? "}]


def test_the_vocabulary_is_full_and_the_mask_is_last(served):
    assert served.vocab_size == VOCAB_SIZE == len(served.backend.get_vocab())
    assert [served.backend.id_to_token(VOCAB_SIZE - len(ADDED) + place) for place in range(len(ADDED))] == list(ADDED)
    ends = {served.backend.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")}
    assert served.eos_token_ids == ends
    assert served.special_ids == {served.backend.token_to_id(name) for name in ADDED if "think" not in name}
    assert served.pretrained.bos_token is None and served.pretrained.pad_token == "<|endoftext|>"


def test_digits_stand_alone_and_text_comes_back(served):
    for number in (7, 42, 2026, 170168):
        assert len(served.encode(f"{number}")) == len(str(number))
    for word in (" write", " carry", " borrow", " then"):
        assert len(served.encode(word)) == 1
    for text in TEXTS[:2]:
        assert served.decode(served.encode(text)) == text


@pytest.mark.parametrize("model_type", [None, "qwen3_5_text", "qwen3_5", "qwen2"])
def test_transformers_reads_the_same_ids_beside_any_config(served, tokenizer_folder, tmp_path, model_type):
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert loaded.encode(text) == served.encode(text)
        assert loaded.encode(text, add_special_tokens=False) == served.encode(text)
    assert loaded.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True) == render_chat(served, ASK)


def test_thinking_both_ways(served):
    asked = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(served, ASK) == render_chat(served, ASK, enable_thinking=True) == asked + "<think>\n"
    closed = render_chat(served, ASK, enable_thinking=False)
    assert closed == asked + "<think>\n\n</think>\n\n"
    assert thought_state(closed, served.chat_template) is Thought.CLOSED
    assert thought_state(render_chat(served, ASK), served.chat_template) is Thought.OPEN


def test_earlier_thoughts_are_dropped_later_ones_kept(served):
    inline = {"role": "assistant", "content": "<think>\n2+3=5\n</think>\n\nIt is 5."}
    apart = {"role": "assistant", "content": "It is 5.", "reasoning_content": "2+3=5"}
    for answer in (inline, apart):
        kept = render_chat(served, [*ASK, answer], add_generation_prompt=False)
        assert kept.endswith("<|im_start|>assistant\n<think>\n2+3=5\n</think>\n\nIt is 5.<|im_end|>\n")
        dropped = render_chat(served, [*ASK, answer, *ASK])
        assert "<|im_start|>assistant\nIt is 5.<|im_end|>\n<|im_start|>user" in dropped
        assert "2+3" not in dropped


@pytest.mark.parametrize(
    "messages, words",
    [
        ([{"role": "system", "content": "Be brief."}], "needs a user message"),
        ([*ASK, {"role": "tool", "content": "5"}], "only system, user and assistant"),
    ],
)
def test_what_the_template_does_not_know_is_refused(served, messages, words):
    with pytest.raises(ValueError, match=words):
        render_chat(served, messages)
    with pytest.raises(ValueError, match="tools: this model's chat template does not read them"):
        render_chat(served, ASK, tools=[{"type": "function", "function": {"name": "f"}}])


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="train on more text"):
        tokenizer.train(["only a few words"])
