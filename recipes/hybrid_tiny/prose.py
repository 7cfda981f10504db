"""SmolLM2's own conversations, sampled by `ddtree train sample`, as clean English question-and-answer pairs and raw texts.

What a 6 M parameter model could only babble about is dropped: code, formulas, many digits, loops. A calculation between
two numbers is dropped as well, so that no held-out operand pair can come in through prose.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend

FORCED = 0  # class in the shards: the sampler's own end of a user turn that grew too long
MAX_QUESTION_WORDS, MAX_ANSWER_WORDS = 80, 220
ROWS_PER_TASK = 256

TYPOGRAPHY = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " ", "•": "-"})
CODE = re.compile(
    r"```|<\||</?\w+>|\bdef \w+\(|\bimport \w+$|\bprint\(|\bself\.|#include|\bfunction\(|[{}\\$^]|==|\+=|\w_\w|\w\(\)|;$|\bpython\b",
    re.IGNORECASE | re.MULTILINE,
)
CALCULATION = re.compile(r"\d\s*(?:[-+*/=×÷<>]|x|plus|minus|times|divided by)\s*\d")
SENTENCE_END = re.compile(r"[a-z)\"'][.!?][\"')]?(?=\s|$)")

Pair = tuple[str, str]  # what the user says, what the assistant answers


@dataclass(frozen=True)
class Prose:
    """Everything usable of the shards."""

    conversations: tuple[tuple[Pair, ...], ...]
    texts: tuple[str, ...]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"conversations": self.conversations, "texts": self.texts}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Prose:
        stored = json.loads(path.read_text(encoding="utf-8"))
        conversations = tuple(tuple((user, reply) for user, reply in pairs) for pairs in stored["conversations"])
        return cls(conversations, tuple(stored["texts"]))


def read_shards(folder: Path, smollm2: Backend, processes: int) -> Prose:
    """Decode and clean all shards in `folder` and below; ValueError if there are none, or nothing usable in them."""
    shards = sorted(folder.rglob("classes_*.npy"))
    if not shards:
        raise ValueError(f"{folder}: no shards classes_*.npy; run `ddtree train sample` first")
    tasks = [(path, start) for path in shards for start in range(0, len(np.load(path, mmap_mode="r")), ROWS_PER_TASK)]
    # Spawned, not forked: the tokenizers library keeps threads, and a fork would copy their locks.
    with get_context("spawn").Pool(processes, _start, (smollm2.to_str(),)) as pool:
        parts = pool.map(_read_rows, tasks, chunksize=1)
    seen: set[Pair] = set()
    conversations = [pairs for part, _ in parts for pairs in part if pairs[0] not in seen and not seen.add(pairs[0])]
    texts = list(dict.fromkeys(text for _, part in parts for text in part))
    if not conversations or not texts:
        raise ValueError(f"{folder}: {len(conversations)} conversations and {len(texts)} raw texts are usable; sample more")
    return Prose(tuple(conversations), tuple(texts))


_worker: dict[str, Backend] = {}


def _start(serialised: str) -> None:
    _worker["smollm2"] = Backend.from_str(serialised)


def _read_rows(task: tuple[Path, int]) -> tuple[list[tuple[Pair, ...]], list[str]]:
    path, start = task
    rows = slice(start, start + ROWS_PER_TASK)
    tokens = np.load(path.with_name(path.name.replace("classes", "tokens")), mmap_mode="r")[rows]
    classes = np.load(path, mmap_mode="r")[rows]
    conversations, texts = [], []
    for row, row_classes in zip(tokens, classes, strict=True):
        if row[0] == _worker["smollm2"].token_to_id("<|endoftext|>"):
            texts += raw_texts(row, _worker["smollm2"])
        elif pairs := conversation(row, row_classes, _worker["smollm2"]):
            conversations.append(pairs)
    return conversations, texts


def conversation(row: np.ndarray, classes: np.ndarray, smollm2: Backend) -> tuple[Pair, ...]:
    """The complete, clean turns at the start of a row `[T]`; the first that is not ends the conversation."""
    start_id, end_id = smollm2.token_to_id("<|im_start|>"), smollm2.token_to_id("<|im_end|>")
    starts = np.flatnonzero(row == start_id)
    turns = []
    for start, stop in zip(starts, [*starts[1:], len(row)], strict=True):
        ends = np.flatnonzero(row[start:stop] == end_id)
        if not len(ends):
            break
        end = start + ends[0]
        role, _, content = smollm2.decode(row[start + 1 : end].tolist(), skip_special_tokens=False).partition("\n")
        if role == "user" and classes[end] == FORCED:
            break  # the sampler cut this turn off
        turns.append((role, content))
    if turns and turns[0][0] == "system":
        turns = turns[1:]
    pairs = []
    for (_, user), (_, reply) in zip(turns[::2], turns[1::2], strict=False):
        question, answer = clean(user), shorten(clean(reply) or "", MAX_ANSWER_WORDS)
        if not question or not answer or len(question.split()) > MAX_QUESTION_WORDS:
            break
        pairs.append((question, answer))
    return tuple(pairs)


def raw_texts(row: np.ndarray, smollm2: Backend) -> list[str]:
    """The clean texts between the end-of-text tokens of a row `[T]`; the last one ends at a sentence."""
    ends = [*np.flatnonzero(row == smollm2.token_to_id("<|endoftext|>")), len(row)]
    texts = []
    for start, stop in zip(ends, ends[1:], strict=False):
        text = smollm2.decode(row[start + 1 : stop].tolist(), skip_special_tokens=False)
        text = shorten(clean(text) or "", MAX_ANSWER_WORDS, is_whole=stop < len(row))
        if len(text.split()) >= 8:
            texts.append(text)
    return texts


def clean(text: str) -> str | None:
    """The text in plain characters, or None if it is not plain English prose."""
    text = re.sub(r"[ \t]+\n", "\n", text.translate(TYPOGRAPHY))
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    letters = sum(character.isalpha() for character in text)
    odd = sum(not character.isascii() or not (character.isprintable() or character == "\n") for character in text)
    num_digits = sum(character.isdigit() for character in text)
    if letters < 2 or odd or num_digits > 0.03 * len(text) + 1 or letters < 0.6 * len(text):
        return None
    if CODE.search(text) or CALCULATION.search(text) or is_looping(text):
        return None
    return text


def is_looping(text: str) -> bool:
    """Does it say the same again and again? By its lines, and by runs of four words."""
    lines = [line for line in text.split("\n") if line]
    words = text.lower().split()
    runs = [tuple(words[start : start + 4]) for start in range(len(words) - 3)]
    return len(set(lines)) < 0.8 * len(lines) or (len(runs) > 8 and len(set(runs)) < 0.8 * len(runs))


def shorten(text: str, max_words: int, is_whole: bool = True) -> str:
    """At most `max_words` words, cut at the end of a paragraph or sentence; empty if there is no such place.

    A text that is not whole is cut so in any case.
    """
    words = list(re.finditer(r"\S+", text))
    if is_whole and len(words) <= max_words:
        return text
    text = text[: words[min(max_words, len(words)) - 1].end()] if words else ""
    ends = [found.end() for found in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


# request -> (how to know it, what the thought says); the first that fits; {t} is the request's topic
THOUGHTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("greeting", r"^(hi|hello|hey|thanks|thank you|good (morning|evening))\b", (
        "The user greets me: {t}. I will answer in a friendly way.",
        "This is small talk, no sum is needed. I will be friendly and short.",
    )),
    ("writing", r"\b(write|compose|create|draft|generate|poem|story|essay|letter|email|script)\b", (
        "The user wants a text: {t}. I will write it in plain words.",
        "This is a writing task. The request is to {t}. I will begin at once and keep to the subject.",
        "No sum is needed here. I will write what is asked: {t}.",
    )),
    ("rewriting", r"\b(rewrite|summarize|summary|edit|improve|proofread|translate|shorten)\b", (
        "The user gives a text to work on: {t}. I will give the new version.",
        "I have to change a text, not to count. I will keep its meaning.",
    )),
    ("listing", r"\b(list|examples|ideas|tips|steps|ways|suggest|recommend)\b", (
        "The user asks for several things: {t}. I will name them one by one.",
        "This asks for a list. There is nothing to count. I will give a few clear points.",
    )),
    ("explaining", r"\b(explain|describe|difference|mean|meaning|tell me about|define|how do|how does|how can|why)\b", (
        "The user wants to understand something: {t}. I will explain it step by step.",
        "This needs an explanation, not a sum. I will start with the main point.",
        "The question is about this: {t}. I will explain it in simple words.",
    )),
    ("asking", r"\?|^(what|who|when|where|which|is|are|can|do|does)\b", (
        "The user asks: {t}. This needs no sum. I will answer in a few plain sentences.",
        "The question is: {t}. I will say what I know about it.",
        "There is nothing to calculate here. The user asks about this: {t}.",
    )),
    ("telling", r"", (
        "The user says: {t}. This needs no sum. I will answer in a few plain sentences.",
        "The message is about this: {t}. I will answer it directly.",
        "No sum is needed. I will read the message and answer it: {t}.",
    )),
)  # fmt: skip
POLITE = re.compile(r"^(?:(?:please|can you|could you|would you|i would like you to|i want you to|help me|hi|hello)[, ]+)+", re.IGNORECASE)

BEGINNINGS = (
    "a an the this that these my your our what which who whose when where why how is are was were do does did can could would "
    "should will may if in on for to there write compose create draft generate make give list name suggest recommend tell "
    "explain describe define discuss compare summarize rewrite edit improve help find provide show choose identify imagine "
    "hello hi hey thanks thank good you we it he she they some many most and also but so let"
)


def topic(request: str) -> str:
    """The first words of what is asked, without politeness and without the stop at their end."""
    sentence = re.split(r"(?<=[a-z])[.?!:](?=\s|$)|\n", request.strip())[0]
    words = (POLITE.sub("", sentence) or sentence).split()[:8]
    text = " ".join(words).strip(" .,;:?!\"'()*#-") or "this"
    # names keep their capital
    return text[0].lower() + text[1:] if re.split(r"\W", text.lower())[0] in BEGINNINGS.split() else text


def think(request: str, rng: random.Random) -> str:
    """A short thought about a request that needs no sum."""
    patterns = next(patterns for _, sign, patterns in THOUGHTS if re.search(sign, request, re.IGNORECASE))
    return rng.choice(patterns).format(t=topic(request))


def words_of(prose: Prose) -> Iterable[str]:
    """Every text once, for training a tokenizer."""
    for pairs in prose.conversations:
        for pair in pairs:
            yield from pair
    yield from prose.texts
