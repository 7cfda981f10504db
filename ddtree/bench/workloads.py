"""Prompt sets: those in the package by name, the user's own as JSONL files with `id` and `turns`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PACKAGED = ("humaneval", "gsm8k", "math500", "mt-bench")
FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Prompt:
    """A conversation to be held: its user turns in order."""

    id: str
    turns: tuple[str, ...]
    set: str
    file: str = ""
    number: int = 1  # its place in the file, from 1


@dataclass(frozen=True)
class Item:
    """One request to measure: a turn with everything said before it."""

    id: str  # the prompt's, with #2 and so on for later turns
    messages: tuple[tuple[str, str], ...]  # (role, content)
    set: str

    def as_messages(self) -> list[dict]:
        return [{"role": role, "content": content} for role, content in self.messages]


def load_prompts(names: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of comma-separated set names and files, the sets in turn, at most `limit` of all together.

    ValueError names the set or the file and line that is wrong.
    """
    sets = [_read(name.strip()) for name in names.split(",") if name.strip()]
    if not any(sets):
        raise ValueError(f"--prompts {names!r} names no prompt; sets in the package: {', '.join(PACKAGED)}")
    longest = max(len(prompts) for prompts in sets)
    mixed = [prompts[i] for i in range(longest) for prompts in sets if i < len(prompts)]
    repeated = sorted({p.id for p in mixed if sum(p.id == other.id for other in mixed) > 1})
    if repeated:
        raise ValueError(f"--prompts: the id {repeated[0]!r} occurs more than once; make the ids unique")
    return mixed[:limit]


def first_turn(prompt: Prompt) -> Item:
    return Item(prompt.id, (("user", prompt.turns[0]),), prompt.set)


def next_turn(prompt: Prompt, item: Item, reply: str) -> Item | None:
    """The turn after `item`, which was answered with `reply`; None after the last one."""
    done = sum(role == "user" for role, _ in item.messages)
    if done == len(prompt.turns):
        return None
    messages = (*item.messages, ("assistant", reply), ("user", prompt.turns[done]))
    return Item(f"{prompt.id}#{done + 1}", messages, prompt.set)


def answer_all(
    prompts: Sequence[Prompt], ask: Callable[[Item], dict], plain: str, say: Callable[[str], None]
) -> tuple[list[Item], dict[str, dict]]:
    """Every turn of every prompt once: the items, and `ask(item)` of each by its id, configuration -> output.

    A later turn follows the reply of configuration `plain`, the same for all.
    """
    items, answers = [], {}
    for number, prompt in enumerate(prompts, start=1):
        item: Item | None = first_turn(prompt)
        while item is not None:
            answers[item.id] = ask(item)
            items.append(item)
            item = next_turn(prompt, item, answers[item.id][plain].text)
        say(f"looked at {number} of {len(prompts)} prompts")
    return items, answers


def _read(name: str) -> list[Prompt]:
    packaged = name in PACKAGED
    path = FOLDER / f"{name}.jsonl" if packaged else Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"--prompts {name}: no such file, nor a set in the package ({', '.join(PACKAGED)})")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            prompt = _parse(line, f"{name}, line {number}", path.stem)
            prompts.append(replace(prompt, file=str(path), number=len(prompts) + 1))
    return prompts


def _parse(line: str, where: str, set_name: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"--prompts {where}: not JSON ({error})") from None
    turns = record.get("turns") if isinstance(record, dict) else None
    good = isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)
    if not good or not isinstance(record.get("id"), str | int):
        raise ValueError(
            f'--prompts {where}: expected {{"id": "...", "turns": ["...", ...]}}, got {line[:80]!r}'
        )
    return Prompt(str(record["id"]), tuple(turns), set_name)
