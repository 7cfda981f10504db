"""Everything hybrid-tiny is trained on, written into one folder.

    python -m recipes.hybrid_tiny.prepare --smollm2 FILE.gguf --shards FOLDER --out FOLDER --samples 3e6 --processes 60

tokenizer/, prose.json, tokens.npy (uint16, flat), classes.npy (uint8, flat), offsets.npy (int64 [n + 1]), prompts.npy and
prompt_offsets.npy (the same form), items.jsonl (the held-out items). The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from recipes.hybrid_tiny import problems, tokenizer
from recipes.hybrid_tiny.chats import Encoder, Mix, make_prompts, make_samples
from recipes.hybrid_tiny.prose import Prose, read_shards, words_of

ITEMS_PER_KIND = 100
NUM_PROMPTS = 200_000
TASK = 10_000  # samples a worker makes at a time
TOKENIZER_CHARACTERS, TOKENIZER_PROBLEMS = 20_000_000, 20_000


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # for training the tokenizer; nothing here forks
    arguments = _arguments()
    start = time.monotonic()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    prose = read_shards(arguments.shards, _smollm2(arguments.smollm2), arguments.processes)
    prose.save(out / "prose.json")
    pairs = sum(map(len, prose.conversations))
    _say(start, f"{len(prose.conversations):,} conversations of {pairs:,} turns, {len(prose.texts):,} raw texts")
    if arguments.tokenizer:
        known = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    else:
        known = tokenizer.train(tokenizer_texts(prose, arguments.seed))
    tokenizer.write(known, out / "tokenizer")
    _say(start, f"tokenizer of {known.get_vocab_size()} entries")
    items = held_out_items(arguments.seed)
    (out / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    _say(start, f"{len(items)} held-out items")
    counts = write_samples(out, arguments.samples, arguments.prompts, arguments.processes, arguments.seed, start)
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({**counts, "conversations": len(prose.conversations), "items": len(items), "seconds": seconds}))


def write_samples(out: Path, samples: int, prompts: int, processes: int, seed: int, start: float) -> dict[str, int]:
    """The five .npy files; returns their counts."""
    tasks = [("samples", number, f"{seed}-samples-{place}") for place, number in enumerate(_shares(samples))]
    tasks += [("prompts", number, f"{seed}-prompts-{place}") for place, number in enumerate(_shares(prompts))]
    made: dict[str, list[tuple[np.ndarray, ...]]] = {"samples": [], "prompts": []}
    with get_context("spawn").Pool(processes, _start, (out,)) as pool:
        for place, (kind, part) in enumerate(pool.imap(_make, tasks), 1):
            made[kind].append(part)
            if place % max(1, len(tasks) // 20) == 0:
                _say(start, f"{place}/{len(tasks)} parts of {TASK:,}")
    counts = {}
    for kind, names in (("samples", ("tokens", "classes")), ("prompts", ("prompts",))):
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([lengths for lengths, *_ in made[kind]]), dtype=np.int64)])
        np.save(out / ("offsets.npy" if kind == "samples" else "prompt_offsets.npy"), offsets)
        for place, name in enumerate(names, 1):
            np.save(out / f"{name}.npy", np.concatenate([part[place] for part in made[kind]]))
        counts |= {kind: len(offsets) - 1, f"{kind}_tokens": int(offsets[-1])}
    return counts


def tokenizer_texts(prose: Prose, seed: int) -> Iterator[str]:
    """Prose up to a length, and problems for the words that thoughts are made of."""
    length = 0
    for text in words_of(prose):
        length += len(text)
        if length > TOKENIZER_CHARACTERS:
            break
        yield text
    rng = random.Random(f"{seed}-tokenizer")
    for _ in range(TOKENIZER_PROBLEMS):
        problem = problems.draw(rng, held_out=False)
        yield f"{problem.question}\n{problem.thought}\n{problem.reply}"


def held_out_items(seed: int) -> list[dict]:
    """The same number of different items of every kind."""
    rng = random.Random(f"{seed}-items")
    items = []
    for kind in problems.KINDS:
        chosen: dict[str, problems.Problem] = {}
        while len(chosen) < ITEMS_PER_KIND:
            problem = problems.draw(rng, held_out=True, kind=kind)
            chosen.setdefault(problem.question, problem)
        items += [
            {"kind": kind, "question": problem.question, "answer": problem.answer, "pairs": problem.pairs}
            for problem in chosen.values()
        ]
    return items


_worker: dict = {}


def _start(out: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker["prose"] = Prose.load(out / "prose.json")
    _worker["encoder"] = Encoder(Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json")))


def _make(task: tuple[str, int, str]) -> tuple[str, tuple[np.ndarray, ...]]:
    """One task: lengths, then the arrays end to end."""
    kind, number, seed = task
    shared = (number, _worker["prose"], Mix(), _worker["encoder"], random.Random(seed))
    made = make_samples(*shared) if kind == "samples" else [(prompt,) for prompt in make_prompts(*shared)]
    lengths = np.array([len(arrays[0]) for arrays in made], np.int64)
    return kind, (lengths, *(np.concatenate(column) for column in zip(*made, strict=True)))


def _shares(number: int) -> list[int]:
    return [min(TASK, number - first) for first in range(0, number, TASK)]


def _smollm2(path: Path) -> Tokenizer:
    from ddtree.text.tokenizer import Tokenizer as Served

    return Served.load(path).backend


def _say(start: float, text: str) -> None:
    print(f"prepare: {time.monotonic() - start:.0f} s, {text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.hybrid_tiny.prepare", description="write hybrid-tiny's training data")
    parser.add_argument("--smollm2", type=Path, required=True, help="GGUF or folder whose tokenizer wrote the shards")
    parser.add_argument("--shards", type=Path, required=True, help="folder written by `ddtree train sample`, or one that holds several such")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokenizer", type=Path, help="folder of a trained target, whose tokenizer goes on: without it prompts are another model's")
    parser.add_argument("--samples", type=_count, default=3_000_000, help="training samples (default 3e6)")
    parser.add_argument("--prompts", type=_count, default=NUM_PROMPTS, help=f"prompts alone (default {NUM_PROMPTS})")
    parser.add_argument("--processes", type=_count, default=os.cpu_count() or 1, help="worker processes (default: all cores)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _count(text: str) -> int:
    try:
        number = int(float(text))
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number >= 1, for instance 3e6, got {text!r}")
    return number


if __name__ == "__main__":
    main()
