"""What is kept of SmolLM2's conversations, and what is dropped."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from recipes.hybrid_tiny.prose import Prose, clean, conversation, raw_texts, shorten, think, topic

FORCED, ANSWER, USER = 0, 1, 2
SYSTEM = "<|im_start|>system\nYou are a helper.<|im_end|>\n"


@pytest.fixture(scope="module")
def backend(tokenizer_folder) -> Backend:
    """Any tokenizer with the template's markers stands for SmolLM2's."""
    return Backend.from_file(str(tokenizer_folder / "tokenizer.json"))


def row_of(backend: Backend, *parts: tuple[str, int]) -> tuple[np.ndarray, np.ndarray]:
    ids = [backend.encode(text).ids for text, _ in parts]
    classes = [[token_class] * len(part) for part, (_, token_class) in zip(ids, parts, strict=True)]
    return np.array(sum(ids, []), np.uint16), np.array(sum(classes, []), np.uint8)


def turns(*texts: str, user_end: int = USER) -> list[tuple[str, int]]:
    parts = [(SYSTEM, FORCED)]
    for user, reply in zip(texts[::2], texts[1::2], strict=True):
        parts += [("<|im_start|>user\n", FORCED), (user, USER), ("<|im_end|>", user_end), ("\n<|im_start|>assistant\n", FORCED)]
        parts += [(reply, ANSWER), ("<|im_end|>", ANSWER), ("\n", FORCED)]
    return parts


def test_complete_turns_become_pairs(backend):
    row, classes = row_of(backend, *turns("What is a bee?", "An insect.", "And a wasp?", "Also an insect."))
    assert conversation(row, classes, backend) == (("What is a bee?", "An insect."), ("And a wasp?", "Also an insect."))
    # the row ends before the last turn's end marker
    assert conversation(row[:-2], classes[:-2], backend) == (("What is a bee?", "An insect."),)


def test_a_user_turn_that_the_sampler_cut_off_ends_the_conversation(backend):
    assert conversation(*row_of(backend, *turns("What is a", "An insect.", user_end=FORCED)), backend) == ()


def test_a_dropped_answer_ends_the_conversation(backend):
    parts = turns("What is a bee?", "An insect.", "Code?", "```python\nx = 1\n```", "And a wasp?", "Also.")
    assert conversation(*row_of(backend, *parts), backend) == (("What is a bee?", "An insect."),)


def test_raw_texts_end_at_their_marker_or_at_a_sentence(backend):
    whole, cut = "The river runs past the old mill and on", "Once there was a cat. It liked the sun very much. Then it"
    row, _ = row_of(backend, (f"<|endoftext|>{whole}<|endoftext|>{cut}", ANSWER))
    assert raw_texts(row, backend) == [whole, "Once there was a cat. It liked the sun very much."]


@pytest.mark.parametrize(
    "text",
    ["", "?", "```python\npass\n```", "def run(x):\n    return x", "你好，世界，你好吗", "In 1914, 1939 and 1945 it was 12, 30 and 55.",
     "It is 24 + 18, so forty-two.", "so it goes on and so it goes on and so it goes on and so it goes on", "a line\n" * 6,
     "We know that \\(x\\) is small.", "Say <|im_end|> now.", "It takes 12 times 30 minutes of work to do."],
)  # fmt: skip
def test_what_is_not_plain_english_is_dropped(text):
    assert clean(text) is None


def test_typography_becomes_plain():
    typed = "It’s “quite fine” – everybody knows this…\n\n\n\nYes, they really do."
    assert clean(typed) == "It's \"quite fine\" - everybody knows this...\n\nYes, they really do."


def test_long_answers_end_at_a_sentence():
    text = "One two three four. Five six seven.\n\nEight nine ten eleven."
    assert shorten(text, 8) == "One two three four. Five six seven."
    assert shorten(text, 11) == text
    assert shorten("No end here at all", 3) == ""


def test_thoughts_take_up_the_request():
    rng = random.Random(0)
    assert topic("Could you please explain how rain forms? Thanks.") == "explain how rain forms"
    assert topic("I'm sad.") == "I'm sad"
    assert topic("Rosa went home.") == "Rosa went home"
    assert topic("Hello!") == "hello"
    requests = ["hello", "Write a poem.", "Summarize this.", "List tips.", "Why is it so?", "Who was she?", "It rains."]
    thoughts = {re.sub(re.escape(topic(request)), "…", think(request, rng)) for request in requests for _ in range(40)}
    assert len(thoughts) >= 15
    assert all(re.fullmatch(r"\S.*\.", thought) for thought in thoughts)


def test_prose_is_saved_and_loaded(prose, tmp_path):
    prose.save(tmp_path / "prose.json")
    assert Prose.load(tmp_path / "prose.json") == prose


def test_prepare_writes_every_file(tokenizer_folder, tmp_path, monkeypatch, capsys, backend):
    from recipes.hybrid_tiny import prepare

    shards, out = tmp_path / "shards", tmp_path / "out"
    shards.mkdir()
    pages = [*Path(prepare.__file__).parents[2].glob("docs/*.md"), Path(prepare.__file__).parents[2] / "LICENSE"]
    paragraphs = [" ".join(part.split()) for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    texts = [text for text in paragraphs if clean(text) and len(text) > 60]
    rows = [row_of(backend, *turns("What is it?", text)) for text in texts]
    rows += [row_of(backend, (f"<|endoftext|>{text}<|endoftext|>", ANSWER)) for text in texts]
    for place, (tokens, classes) in enumerate(rows):
        np.save(shards / f"tokens_{place:04d}.npy", tokens[None])
        np.save(shards / f"classes_{place:04d}.npy", classes[None])
    monkeypatch.setattr(prepare, "TOKENIZER_PROBLEMS", 500)
    monkeypatch.setattr(prepare, "ITEMS_PER_KIND", 3)
    arguments = ["--smollm2", str(tokenizer_folder), "--shards", str(shards), "--out", str(out), "--samples", "3e2"]
    monkeypatch.setattr("sys.argv", ["prepare", *arguments, "--prompts", "60", "--processes", "1"])
    prepare.main()
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert counts["samples"] == 300 and counts["prompts"] == 60 and counts["items"] == 15
    offsets, tokens, classes = (np.load(out / f"{name}.npy") for name in ("offsets", "tokens", "classes"))
    assert (offsets.dtype, tokens.dtype, classes.dtype) == (np.int64, np.uint16, np.uint8)
    assert len(offsets) == 301 and offsets[0] == 0 and offsets[-1] == len(tokens) == len(classes) == counts["samples_tokens"]
    assert np.load(out / "prompt_offsets.npy")[-1] == len(np.load(out / "prompts.npy"))
    items = [json.loads(line) for line in (out / "items.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({item["question"] for item in items}) == 15
    assert set(items[0]) == {"kind", "question", "answer", "pairs"}
