"""Accuracy of `hybrid-tiny` on its held-out items: thinking on and off, plain and with trees, side by side.

    python -m benchmarks.accuracy --target hybrid-tiny --items ddtree/embedded/hybrid-tiny/items.jsonl --processes 8

An item is right when the last number of the answer (behind the thought) is the item's. Trees must give the very same tokens, so the
two columns must be the same number; where tokens differ the item is listed and the exit status is 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

from benchmarks.speed import cpu_name


def read_answer(text: str) -> int | None:
    """The last number of what follows the thought; None when there is none or the thought never ended."""
    _, closed, answer = text.rpartition("</think>")
    numbers = re.findall(r"-?\d+", (answer if closed else text).replace(",", "").replace("−", "-"))
    return int(numbers[-1]) if numbers else None


class Shard:
    """One process: its own engine, its share of the items."""

    def __init__(self, args, index: int) -> None:
        from ddtree.engine.loading import load_engine
        from ddtree.sources import resolve
        from ddtree.text.tokenizer import Tokenizer

        torch.set_num_threads(args.threads)
        device = args.device
        if device == "cuda" and torch.cuda.device_count() > 1:
            device = f"cuda:{index % torch.cuda.device_count()}"
        source = resolve(args.target, args.drafter)
        self.args, self.tokenizer = args, Tokenizer.load(source.target)
        self.engine = load_engine(source.target, source.drafter, device=device, dtype=args.dtype, adapter=args.adapter)
        self.engine.config = replace(self.engine.config, max_running=args.side_by_side)

    def ask(self, items: list[dict], thinking: bool, budget: int) -> list[list[int]]:
        """The tokens of every item's answer."""
        from ddtree.engine.request import Request
        from ddtree.text.chat import render_chat

        tokens, order = {}, []
        for item in items:
            prompt = render_chat(self.tokenizer, [{"role": "user", "content": item["question"]}], enable_thinking=thinking)
            ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=False))
            request = Request(ids, self.args.max_tokens, tree_budget=budget, eos_token_ids=frozenset(self.tokenizer.eos_token_ids))
            order.append(self.engine.add(request))
            tokens[order[-1]] = []
        while self.engine.has_work:
            for emission in self.engine.step():
                if emission.error:
                    raise RuntimeError(emission.error)
                tokens[emission.request_id].extend(emission.token_ids)
                if emission.stats is not None:
                    self.rounds[budget, thinking][0] += emission.stats.decode_rounds
                    self.rounds[budget, thinking][1] += emission.stats.output_tokens - 1 + emission.stats.trimmed_tokens
        return [tokens[request_id] for request_id in order]

    def run(self, items: list[dict]) -> tuple[list[dict], dict]:
        self.rounds = defaultdict(lambda: [0, 0])
        records = []
        for thinking in (True, False):
            answers = {budget: self.ask(items, thinking, budget) for budget in self.args.budgets}
            for place, item in enumerate(items):
                texts = {b: self.tokenizer.decode(rows[place], skip_special_tokens=False) for b, rows in answers.items()}
                plain = answers[self.args.budgets[0]][place]
                records.append({
                    "kind": item["kind"],
                    "thinking": thinking,
                    "question": item["question"],
                    "right": {b: read_answer(self._strip(text)) == item["answer"] for b, text in texts.items()},
                    "differs": [b for b, rows in answers.items() if rows[place] != plain],
                    "text": texts[self.args.budgets[0]],
                })  # fmt: skip
        return records, dict(self.rounds)

    def _strip(self, text: str) -> str:
        for marker in ("<|im_end|>", "<|endoftext|>"):
            text = text.replace(marker, "")
        return text


def work(args, index: int, items: list[dict], results) -> None:
    try:
        results.put(Shard(args, index).run(items[index :: args.processes]))
    except BaseException as error:
        results.put(f"process {index}: {type(error).__name__}: {error}")
        raise


def summarise(args, records: list[dict], rounds: dict, seconds: float) -> dict:
    kinds = [*sorted({record["kind"] for record in records}), "all"]
    table = {}
    for thinking in (True, False):
        for kind in kinds:
            chosen = [r for r in records if r["thinking"] == thinking and kind in (r["kind"], "all")]
            row = {str(b): round(sum(r["right"][b] for r in chosen) / max(1, len(chosen)), 4) for b in args.budgets}
            table[f"{kind}, thinking {'on' if thinking else 'off'}"] = row
    return {
        "items": len(records) // 2,
        "accuracy": table,
        "acceptance_length": {
            f"budget {budget}, thinking {'on' if thinking else 'off'}": round(emitted / max(1, count), 3)
            for (budget, thinking), (count, emitted) in sorted(rounds.items())
        },
        "differing": [record for record in records if record["differs"]],
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else cpu_name(),
        "dtype": args.dtype,
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "command": "python -m benchmarks.accuracy " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
    }


def main() -> int:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="hybrid-tiny")
    parser.add_argument("--drafter")
    parser.add_argument("--adapter", default="auto", help='a folder, or "none"')
    parser.add_argument("--items", type=Path, required=True)
    parser.add_argument("--budgets", type=numbers, default=[0, 64])
    parser.add_argument("--limit", type=int, default=10**6)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--side-by-side", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="print this many wrong answers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    items = [json.loads(line) for line in args.items.read_text(encoding="utf-8").splitlines()][: args.limit]
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=work, args=(args, i, items, results), daemon=True) for i in range(args.processes)]
    for worker in workers:
        worker.start()
    records, rounds = [], defaultdict(lambda: [0, 0])
    for _ in workers:
        result = results.get()
        if isinstance(result, str):
            raise SystemExit(result)
        records += result[0]
        for key, (count, emitted) in result[1].items():
            rounds[key][0] += count
            rounds[key][1] += emitted
    summary = summarise(args, records, rounds, time.perf_counter() - started)
    for record in [r for r in records if r["thinking"] and not r["right"][args.budgets[0]]][: args.show]:
        print(f"--- {record['question']}\n{record['text']}")
    print(f"{'':34}" + "".join(f"budget {budget:<6}" for budget in args.budgets))
    for name, row in summary["accuracy"].items():
        print(f"{name:34}" + "".join(f"{row[str(budget)]:<13.1%}" for budget in args.budgets))
    if args.out:
        args.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 1 if summary["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
