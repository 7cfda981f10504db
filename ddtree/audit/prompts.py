"""The prompts of an audit, in both of the forms in which servers get them, and what may be wrong with a form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree.text import Tokenizer, knows_thinking, render_chat

CHAT, RAW = "chat", "raw"
BUILT_IN = (
    ("mill", "Explain to a ten-year-old how a water mill turns grain into flour."),
    ("buses", "A bus leaves at 8:05 and every 25 minutes after that. Write down the first six departures and explain."),
    ("palindrome", "Write a Python function that tells whether a string is a palindrome, ignoring spaces and case."),
    ("letter", "Write a short letter to a neighbour who has watered your plants for two weeks."),
    ("planets", "List the planets of the solar system from the smallest to the largest, one a line."),
    ("translate", "Übersetze ins Englische: Der Hund schläft unter dem alten Apfelbaum, und niemand weckt ihn."),
    ("json", 'Give me a JSON object with the keys "name", "age" and "hobbies" for an invented person.'),
    ("sheep", "A farmer has 17 sheep, buys 8, sells half of them and loses one. How many are left? Think step by step."),
    ("sql", "Write an SQL query for the five customers with the highest total of orders in 2024."),
    ("story", "Continue this story in three sentences: The lighthouse had been dark for a year when the lamp lit itself."),
    ("yes", "Is water wet? Answer with one word."),
    ("steps", "How do I change the wheel of a bicycle? Number the steps."),
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """One prompt in one form, as the token ids that the engine gets."""

    id: str
    form: str
    text: str  # what the user wrote
    token_ids: tuple[int, ...]
    thinking: bool | None = None  # as the template was told; None leaves it to the template

    @property
    def label(self) -> str:
        """For people: id and form."""
        thought = "" if self.thinking is None else f", thinking {'on' if self.thinking else 'off'}"
        return f"{self.id} ({self.form}{thought})"


def read_prompts(file: Path | None) -> list[tuple[str, str]]:
    """(id, first turn) of each line of a prompt file; the built-in ones without a file. ValueError names the line."""
    if file is None:
        return list(BUILT_IN)
    found = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            found.append((str(item["id"]), str(item["turns"][0])))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f'{file}, line {number}: expected {{"id": …, "turns": ["…"]}}, found something else ({error})'
            ) from None
    if not found:
        raise ValueError(f"{file}: no prompts in it")
    return found


def chat_ids(tokenizer: Tokenizer, text: str, thinking: bool | None = None) -> list[int]:
    """The ids of a chat with one turn."""
    rendered = render_chat(tokenizer, [{"role": "user", "content": text}], enable_thinking=thinking)
    return tokenizer.encode(rendered, add_special_tokens=False)


def raw_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a raw completion."""
    return tokenizer.encode(text)


def encode_all(
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, str]],
    chat: Callable = chat_ids,
    raw: Callable = raw_ids,
    thinking: Sequence[bool] | None = None,
) -> list[Prompt]:
    """Every text in both of the endpoints' forms: as a chat where the model has a template, with each of `thinking`
    where that knows the switch (None: on and off in turn), and as a raw completion."""
    knows, prompts = knows_thinking(tokenizer.chat_template), []
    for number, (name, text) in enumerate(texts):
        for switch in switches_of(thinking, number, knows) if tokenizer.chat_template else ():
            prompts.append(Prompt(name, CHAT, text, tuple(chat(tokenizer, text, switch)), switch))
        prompts.append(Prompt(name, RAW, text, tuple(raw(tokenizer, text))))
    return [prompt for prompt in prompts if prompt.token_ids]


def switches_of(thinking: Sequence[bool] | None, number: int, knows: bool) -> tuple[bool | None, ...]:
    """The thinking switches for text `number`; (None,) where the template knows none."""
    if not knows:
        return (None,)
    return (number % 2 == 0,) if thinking is None else tuple(thinking)


def prompt_fault(tokenizer: Tokenizer, prompt: Prompt) -> str | None:
    """What is wrong with a prompt's ids, whatever made them: the text of the finding, or None."""
    ids = list(prompt.token_ids)
    bos = tokenizer.pretrained.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        return f"{prompt.form} prompt: two BOS tokens ({tokenizer.token_text(bos)!r}) at its start"
    return _raw_fault(tokenizer, prompt) if prompt.form == RAW else _chat_fault(tokenizer, prompt)


def special_counts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> dict[str, int]:
    """How often each special token occurs, by its text."""
    counts: dict[str, int] = {}
    for token_id in token_ids:
        if token_id in tokenizer.special_ids:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            counts[text] = counts.get(text, 0) + 1
    return counts


def _raw_fault(tokenizer: Tokenizer, prompt: Prompt) -> str | None:
    """A raw completion is its text, perhaps between the tokenizer's own BOS and EOS, and nothing else."""
    bare = tokenizer.backend.encode(prompt.text, add_special_tokens=False).ids
    if _inside(bare, prompt.token_ids):
        outside = _surplus(bare, prompt.token_ids)
        own = {tokenizer.pretrained.bos_token_id, *tokenizer.eos_token_ids, tokenizer.pretrained.eos_token_id}
        if len(outside) <= 2 and set(outside) <= own:
            return None
    rendered = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    added = special_counts(tokenizer, prompt.token_ids)
    if tokenizer.chat_template and prompt.text.strip() in rendered and len(rendered) > len(prompt.text):
        return (
            f"raw prompt: a chat template was applied to a raw completion; special tokens {added}, "
            f"rendered {_short(rendered)!r}"
        )
    return f"raw prompt: its ids read {_short(rendered)!r}, the text is {_short(prompt.text)!r}"


def _chat_fault(tokenizer: Tokenizer, prompt: Prompt) -> str | None:
    """A chat is exactly what the model's own template writes, rendered here by the template library alone."""
    switch = {} if prompt.thinking is None else {"enable_thinking": prompt.thinking}
    rendered = tokenizer.pretrained.apply_chat_template(
        [{"role": "user", "content": prompt.text}],
        chat_template=tokenizer.chat_template,
        add_generation_prompt=True,
        tokenize=False,
        **switch,
    )
    expected = tokenizer.backend.encode(rendered, add_special_tokens=False).ids
    if expected == list(prompt.token_ids):
        return None
    mine, own = special_counts(tokenizer, prompt.token_ids), special_counts(tokenizer, expected)
    text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    if mine != own:
        return f"chat prompt: special tokens {mine}, the model's template writes {own}; rendered {_short(text)!r}"
    return f"chat prompt: reads {_short(text)!r}, the model's template writes {_short(rendered)!r}"


def _inside(part: Sequence[int], whole: Sequence[int]) -> bool:
    part, whole = list(part), list(whole)
    return any(whole[i : i + len(part)] == part for i in range(min(3, len(whole) - len(part) + 1)))


def _surplus(part: Sequence[int], whole: Sequence[int]) -> list[int]:
    """What stands around `part`."""
    part, whole = list(part), list(whole)
    start = next(i for i in range(len(whole) - len(part) + 1) if whole[i : i + len(part)] == part)
    return whole[:start] + whole[start + len(part) :]


def _short(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit // 2] + " … " + text[-limit // 2 :]
