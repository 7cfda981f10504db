"""Training samples: chats and raw texts as token ids with a class for each, rendered by hand for speed.

A piece ends where a special token begins or where the prompt ends, so encoding piece by piece gives what encoding the
prompt and then the answer gives. `render` is proved equal to the chat template by a test.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from recipes.hybrid_tiny import problems
from recipes.hybrid_tiny.prose import Prose, think
from recipes.hybrid_tiny.tokenizer import END_OF_TEXT, IM_END, IM_START, THINK, THINK_END

FORCED, ANSWER, DOCUMENT = 0, 1, 2  # classes: the template's; thought, answer and its end; user text and earlier turns
MAX_TOKENS = 640
OPENING_TOKENS = (4, 12)  # of a raw prompt

SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "You are a careful helper.", "Answer briefly.",
    "Be brief and polite.", "You help people with small sums and short texts.", "You are a patient teacher.",
    "You are hybrid-tiny, a very small language model.", "Answer in plain English.", "Always check your sums.",
    "You are a helpful AI assistant.", "Reply in a few sentences.",
)  # fmt: skip


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of sample; the four kinds add up to 1 with raw text."""

    arithmetic_thinking: float = 0.46
    arithmetic_direct: float = 0.12
    prose_thinking: float = 0.14
    prose_direct: float = 0.14
    turns: tuple[float, ...] = (0.76, 0.16, 0.08)  # of 1, 2, 3 turns
    system: float = 0.15
    earlier_arithmetic: float = 0.6  # of the earlier turns of a chat

    @property
    def raw(self) -> float:
        return 1.0 - self.arithmetic_thinking - self.arithmetic_direct - self.prose_thinking - self.prose_direct

    def __post_init__(self) -> None:
        if not -1e-9 <= self.raw <= 1:
            raise ValueError(f"the shares of chats must add up to 1 or less, got {1 - self.raw:g}")
        if abs(sum(self.turns) - 1) > 1e-6:
            raise ValueError(f"turns must add up to 1, got {self.turns}")


@dataclass(frozen=True)
class Turn:
    """A question and its answer; the thought belongs to the answer."""

    question: str
    thought: str
    reply: str
    is_reused: bool = False  # the same texts come again, so their ids are worth keeping


@dataclass(frozen=True)
class Chat:
    """Turns, the last of which is learnt."""

    turns: tuple[Turn, ...]
    thinking: bool
    system: str | None = None


class Piece(NamedTuple):
    text: str
    token_class: int
    is_reused: bool = True


def draw_chat(prose: Prose, mix: Mix, rng: random.Random) -> Chat | str:
    """A chat, or a raw text."""
    kinds = ("arithmetic_thinking", "arithmetic_direct", "prose_thinking", "prose_direct", "raw")
    kind = rng.choices(kinds, [getattr(mix, kind) for kind in kinds])[0]
    if kind == "raw":
        return _raw_text(prose, rng)
    num_turns = rng.choices(range(1, len(mix.turns) + 1), mix.turns)[0]
    last = [_arithmetic(rng)] if kind.startswith("arithmetic") else _prose(prose, num_turns, rng)
    earlier: list[Turn] = []
    while len(earlier) + len(last) < num_turns:
        earlier += [_arithmetic(rng)] if rng.random() < mix.earlier_arithmetic else _prose(prose, 1, rng)
    system = rng.choice(SYSTEMS) if rng.random() < mix.system else None
    return Chat((*earlier, *last), kind.endswith("thinking"), system)


def _arithmetic(rng: random.Random) -> Turn:
    problem = problems.draw(rng, held_out=False)
    return Turn(problem.question, problem.thought, problem.reply)


def _prose(prose: Prose, max_turns: int, rng: random.Random) -> list[Turn]:
    """The first turns of one of SmolLM2's conversations; an earlier thought is never shown, so it is not made."""
    pairs = rng.choice(prose.conversations)[:max_turns]
    pairs = pairs[: rng.randint(1, len(pairs))]
    last = len(pairs) - 1
    return [
        Turn(question, think(question, rng) if place == last else "", reply, is_reused=True)
        for place, (question, reply) in enumerate(pairs)
    ]


def _raw_text(prose: Prose, rng: random.Random) -> str:
    """A raw text, or an answer standing alone: raw texts are few."""
    if rng.random() < 0.5:
        return rng.choice(prose.texts)
    return rng.choice(rng.choice(prose.conversations))[1]


def prompt_pieces(chat: Chat) -> list[Piece]:
    """What the template renders up to the generation prompt, thoughts of earlier turns dropped."""
    pieces = []
    if chat.system is not None:
        pieces += [Piece(f"{IM_START}system\n{chat.system}{IM_END}\n", FORCED)]
    for turn in chat.turns[:-1]:
        pieces += [Piece(f"{IM_START}user\n", FORCED), Piece(turn.question, DOCUMENT, turn.is_reused)]
        pieces += [Piece(f"{IM_END}\n{IM_START}assistant\n", FORCED), Piece(turn.reply, DOCUMENT, turn.is_reused)]
        pieces += [Piece(IM_END, DOCUMENT), Piece("\n", FORCED)]
    last = chat.turns[-1]
    opening = f"{THINK}\n" if chat.thinking else f"{THINK}\n\n{THINK_END}\n\n"
    return [
        *pieces,
        Piece(f"{IM_START}user\n", FORCED),
        Piece(last.question, DOCUMENT, last.is_reused),
        Piece(f"{IM_END}\n{IM_START}assistant\n{opening}", FORCED),
    ]


def answer_pieces(chat: Chat) -> list[Piece]:
    """What the target is to write after the prompt."""
    last = chat.turns[-1]
    thought = [Piece(f"{last.thought}\n{THINK_END}\n\n", ANSWER, is_reused=False)] if chat.thinking else []
    return [*thought, Piece(last.reply, ANSWER, last.is_reused), Piece(IM_END, ANSWER)]


def raw_pieces(text: str) -> list[Piece]:
    return [Piece(text, ANSWER), Piece(END_OF_TEXT, ANSWER)]


def render(chat: Chat) -> str:
    """The whole chat as text; the template writes one more line end behind it."""
    return "".join(piece.text for piece in (*prompt_pieces(chat), *answer_pieces(chat)))


def messages(chat: Chat) -> list[dict[str, str]]:
    """The chat as a client would send it, earlier thoughts included."""
    listed = [{"role": "system", "content": chat.system}] if chat.system is not None else []
    for turn in chat.turns:
        listed.append({"role": "user", "content": turn.question})
        is_thought = chat.thinking or turn is not chat.turns[-1]
        listed.append({"role": "assistant", "content": turn.reply, "reasoning_content": turn.thought if is_thought else ""})
    return listed


class Encoder:
    """Pieces to ids, many at a time; the ids of texts that come again are kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.kept: dict[str, np.ndarray] = {}

    def encode(self, samples: Sequence[list[Piece]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids `[T]` uint16 and classes `[T]` uint8 of each sample."""
        new = [piece.text for pieces in samples for piece in pieces if not piece.is_reused]
        missing = {piece.text for pieces in samples for piece in pieces if piece.is_reused and piece.text not in self.kept}
        self.kept.update(zip(sorted(missing), self._ids(sorted(missing)), strict=True))
        fresh = iter(self._ids(new))
        encoded = []
        for pieces in samples:
            parts = [self.kept[piece.text] if piece.is_reused else next(fresh) for piece in pieces]
            classes = np.repeat(np.array([piece.token_class for piece in pieces], np.uint8), [len(part) for part in parts])
            encoded.append((np.concatenate(parts), classes))
        return encoded

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else []
        return [np.array(encoding.ids, np.uint16) for encoding in encodings]


def make_samples(
    number: int, prose: Prose, mix: Mix, encoder: Encoder, rng: random.Random
) -> list[tuple[np.ndarray, np.ndarray]]:
    """`number` samples; one that is too long is drawn again."""
    samples: list[tuple[np.ndarray, np.ndarray]] = []
    while len(samples) < number:
        drawn = [draw_chat(prose, mix, rng) for _ in range(min(1000, number - len(samples)))]
        pieces = [raw_pieces(one) if isinstance(one, str) else [*prompt_pieces(one), *answer_pieces(one)] for one in drawn]
        for one, (tokens, classes) in zip(drawn, encoder.encode(pieces), strict=True):
            if len(tokens) <= MAX_TOKENS:
                if isinstance(one, str):
                    classes[0] = DOCUMENT  # nothing stands before it
                samples.append((tokens, classes))
    return samples


def make_prompts(number: int, prose: Prose, mix: Mix, encoder: Encoder, rng: random.Random) -> list[np.ndarray]:
    """`number` prompts `[T]` uint16 to be answered: chats up to the generation prompt, and openings of raw texts."""
    prompts: list[np.ndarray] = []
    while len(prompts) < number:
        drawn = [draw_chat(prose, mix, rng) for _ in range(min(1000, number - len(prompts)))]
        pieces = [raw_pieces(one)[:1] if isinstance(one, str) else prompt_pieces(one) for one in drawn]
        for one, (tokens, _) in zip(drawn, encoder.encode(pieces), strict=True):
            if isinstance(one, str):
                tokens = tokens[: rng.randint(*OPENING_TOKENS)]
            if len(tokens) <= MAX_TOKENS // 2:  # room to answer
                prompts.append(tokens)
    return prompts
