"""Token-for-token equality: every budget against budget 0, budget 0 against transformers greedy; acceptance on the way.

    python -m benchmarks.equality --target FILE.gguf --drafter FOLDER --prompts ../shared/prompts --processes 4

All prompts at --budgets; the first --subset prompts of the sets, evenly, also at --more-budgets and at temperature 0.8. Each
process decodes --side-by-side prompts in common forwards: a launch-bound GPU then does as many prompts in the time of one.
Against transformers: every token of the answer must be the argmax of one transformers forward over prompt and answer, which is greedy
decoding by induction; the first --generate prompts also run `generate` itself.
A divergence is re-scored by a fresh forward of the common prefix: below 1e-4 it is a near tie and listed, else a
mismatch and exit status 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

NEAR_TIE = 1e-4
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
SEED = 20261129


def read_prompts(folder: Path) -> list[dict]:
    """All prompts of the folder's sets, first turns, in an order that alternates between the sets."""
    sets = {path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in sorted(folder.glob("*.jsonl"))}
    longest = max(len(items) for items in sets.values())
    return [
        {"set": name, "id": items[i]["id"], "text": items[i]["turns"][0]}
        for i in range(longest)
        for name, items in sets.items()
        if i < len(items)
    ]


class Shard:
    """One process: its own engine, its share of the prompts."""

    def __init__(self, args):
        from ddtree.engine.loading import load_engine
        from ddtree.text.tokenizer import Tokenizer

        torch.set_num_threads(args.threads)
        torch.set_float32_matmul_precision("highest")  # no TF32
        self.args = args
        self.tokenizer = Tokenizer.load(Path(args.target))
        sizes = {"device": args.device, "dtype": args.dtype, "max_running": args.side_by_side, "batch_invariant": args.batch_invariant}
        self.engine = load_engine(args.target, args.drafter, **sizes)
        self.reference = self._load_reference() if args.reference else None

    def _load_reference(self):
        from transformers import AutoModelForCausalLM

        path = Path(self.args.target)
        where = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        model = AutoModelForCausalLM.from_pretrained(where[0], dtype=self.dtype, **where[1])
        return model.to(self.args.device).eval()

    @property
    def dtype(self):
        return getattr(torch, self.args.dtype)

    def render(self, text: str) -> tuple[int, ...]:
        from ddtree.text.chat import render_chat

        thinking = {"on": True, "off": False}.get(self.args.thinking)
        prompt = render_chat(self.tokenizer, [{"role": "user", "content": text}], enable_thinking=thinking)
        return tuple(self.tokenizer.encode(prompt, add_special_tokens=False))

    def request(self, prompt, budget, sampled):
        from ddtree.engine.request import Request
        from ddtree.sampling.params import SamplingParams

        return Request(
            prompt,
            max_tokens=self.args.max_tokens,
            sampling=SamplingParams(**SAMPLED) if sampled else SamplingParams(),
            seed=SEED,
            tree_budget=budget,
            eos_token_ids=frozenset(self.tokenizer.eos_token_ids),
        )

    @torch.inference_mode()
    def transformers_greedy(self, prompt, plain: list[int], generate: bool) -> list[int]:
        """What transformers writes after `prompt`, up to its first difference from `plain`."""
        ids = torch.tensor([prompt], device=self.args.device)
        eos = sorted(self.tokenizer.eos_token_ids)
        if generate:
            output = self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.args.max_tokens,
                do_sample=False,
                eos_token_id=eos,
                pad_token_id=eos[0],
            )
            return output[0, len(prompt) :].tolist()
        whole = torch.tensor([[*prompt, *plain[:-1]]], device=self.args.device)
        chosen = self.reference(whole).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        wrong = next((i for i, pair in enumerate(zip(chosen, plain, strict=True)) if pair[0] != pair[1]), len(plain) - 1)
        return chosen[: wrong + 1]

    def margin_at(self, prompt, tokens, position, sampled) -> float:
        """The margin of the token at `position` of the answer, from a fresh forward of everything before it."""
        from ddtree.caches.rows import Rows, Span
        from ddtree.engine.sequence import Sequence
        from ddtree.sampling.choose import margins

        model, device = self.engine.target.model, self.engine.target.device
        prefix = torch.tensor([*prompt, *tokens[:position]], device=device)
        cache = model.new_cache()
        rows = Rows(prefix, torch.arange(len(prefix), device=device), (Span(cache, 0, len(prefix), None, None),))
        request = self.request(prompt, 0, sampled)
        sequence = Sequence(0, request)
        sequence.open_noise(model.config.vocab_size, device)
        with torch.inference_mode():
            logits = model.logits(model(rows).hidden[-1:])
            noise = sequence.noise(len(prefix), 1) if sequence.noise else None
            return float(margins(logits, request.sampling, noise)[0])

    def decode(self, prompts: list[dict], budget: int, sampled: bool) -> list:
        """The last emissions of `prompts` at one budget, all their tokens in each."""
        ids = [self.engine.add(self.request(prompt["ids"], budget, sampled)) for prompt in prompts]
        tokens, last = {request_id: [] for request_id in ids}, {}
        while self.engine.has_work:
            for emission in self.engine.step():
                tokens[emission.request_id].extend(emission.token_ids)
                if emission.finish_reason == "error":
                    raise RuntimeError(emission.error)
                if emission.finish_reason:
                    last[emission.request_id] = emission
        return [replace(last[request_id], token_ids=tuple(tokens[request_id])) for request_id in ids]

    def run(self, prompts: list[dict], budgets, sampled: bool) -> list[dict]:
        """Some prompts at every budget; what differs from budget 0, and the acceptance counts."""
        records = [{"set": p["set"], "sampled": sampled, "counts": {}, "divergences": []} for p in prompts]
        for budget in budgets:
            for prompt, record, emission in zip(prompts, records, self.decode(prompts, budget, sampled), strict=True):
                tokens, stats = list(emission.token_ids), emission.stats
                assert stats.output_tokens == len(tokens)
                plain = record.setdefault("plain", tokens)
                emitted = sum(length * count for length, count in stats.acceptance_histogram.items())
                record["counts"][budget] = (stats.decode_rounds, emitted)
                self._compare(record["divergences"], prompt, prompt["ids"], plain, tokens, f"budget {budget}", sampled)
        for prompt, record in zip(prompts, records, strict=True):
            plain = record.pop("plain")
            record["tokens"] = len(plain)
            if self.reference is not None and not sampled:
                tokens = self.transformers_greedy(prompt["ids"], plain, prompt["number"] < self.args.generate)
                self._compare(record["divergences"], prompt, prompt["ids"], plain, tokens, "transformers", sampled)
        return records

    def _compare(self, found, prompt, ids, plain, tokens, against, sampled):
        if tokens == plain:
            return
        position = next(
            (i for i, pair in enumerate(zip(plain, tokens, strict=False)) if pair[0] != pair[1]),
            min(len(plain), len(tokens)),
        )
        margin = self.margin_at(ids, plain, position, sampled)
        found.append(
            {"prompt_id": prompt["id"], "against": against, "sampled": sampled, "position": position, "margin": margin}
        )


def work(args, index: int, results) -> None:
    try:
        if args.device == "cuda" and torch.cuda.device_count() > 1:
            args.device = f"cuda:{index % torch.cuda.device_count()}"
        shard = Shard(args)
        mine = args.plan[index :: args.processes]
        for prompt in mine:
            prompt["ids"] = shard.render(prompt["text"])
        groups = {full: [p for p in mine if (p["number"] < args.subset) == full] for full in (True, False)}
        for full, members in groups.items():
            greedy = sorted({*args.budgets, *(args.more_budgets if full else ())})
            for start in range(0, len(members), args.side_by_side):
                if time.time() > args.deadline:
                    break
                some = members[start : start + args.side_by_side]
                for sampled in (False, True) if full else (False,):
                    for record in shard.run(some, greedy, sampled):
                        results.put(record)
        results.put(None)
    except BaseException as error:
        results.put(f"shard {index}: {type(error).__name__}: {error}")
        raise


def summarise(args, records: list[dict], seconds: float) -> dict:
    """Pooled acceptance per set and budget, and the verdict."""
    pooled = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for record in records:
        for budget, (rounds, emitted) in record["counts"].items():
            for name in (record["set"], "all"):
                cell = pooled[("sampled " if record["sampled"] else "") + name][budget]
                cell[0] += rounds
                cell[1] += emitted
    divergences = [each for record in records for each in record["divergences"]]
    worst = max((each["margin"] for each in divergences), default=0.0)
    verdict = "identical" if not divergences else "near_tie" if worst < NEAR_TIE else "mismatch"
    return {
        "verdict": verdict,
        "prompts": sum(not record["sampled"] for record in records),
        "prompts_asked": len(args.plan),
        "sampled_prompts": sum(record["sampled"] for record in records),
        "runs": sum(len(record["counts"]) for record in records),
        "tokens": sum(record["tokens"] for record in records),
        "max_tokens": args.max_tokens,
        "budgets": args.budgets,
        "more_budgets": args.more_budgets,
        "thinking": args.thinking,
        "against_transformers": bool(args.reference),
        "generated_by_transformers": min(args.generate, len(args.plan)) if args.reference else 0,
        "processes": args.processes,
        "side_by_side": args.side_by_side,
        "divergences": divergences,
        "acceptance_length": {
            name: {str(budget): round(emitted / rounds, 3) for budget, (rounds, emitted) in sorted(cells.items()) if rounds}
            for name, cells in sorted(pooled.items())
        },
        "devices": torch.cuda.device_count() if args.device.startswith("cuda") else 1,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "cpu",
        "dtype": args.dtype,
        "batch_invariant": args.batch_invariant,
        "tf32": False,
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "command": "python -m benchmarks.equality " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
    }


def main() -> int:
    numbers = lambda text: [int(part) for part in text.split(",") if part]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--budgets", type=numbers, default=[0, 16, 64, 256, 1024])
    parser.add_argument("--more-budgets", type=numbers, default=[1, 2, 7, 15, 32, 128, 512])
    parser.add_argument("--subset", type=int, default=40)
    parser.add_argument("--limit", type=int, default=10**6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-invariant", action="store_true", help="in bfloat16 on a GPU nothing may differ then")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--side-by-side", type=int, default=8)
    parser.add_argument("--thinking", choices=("default", "on", "off"), default="default")
    parser.add_argument("--generate", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no further group after this long")
    parser.add_argument("--grace-minutes", type=float, default=1.0, help="then stop, with what has come in")
    parser.add_argument("--no-reference", dest="reference", action="store_false")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.deadline = time.time() + 60 * args.minutes
    args.plan = read_prompts(args.prompts)[: args.limit]
    for number, prompt in enumerate(args.plan):
        prompt["number"] = number
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=work, args=(args, i, results), daemon=True) for i in range(args.processes)]
    for worker in workers:
        worker.start()
    records, running, faults = [], args.processes, []
    while running:
        try:
            item = results.get(timeout=max(1.0, args.deadline + 60 * args.grace_minutes - time.time()))
        except queue.Empty:
            faults.append(f"{running} processes were still at work after the grace time")
            break
        if item is None or isinstance(item, str):
            running -= 1
            faults += [item] if item else []
            continue
        records.append(item)
        if len(records) % 20 == 0:
            print(f"{len(records)} runs, {time.perf_counter() - started:.0f} s", flush=True)
    for worker in workers:
        worker.terminate()
    summary = summarise(args, records, time.perf_counter() - started)
    if faults:
        summary.update(verdict="mismatch" if summary["verdict"] == "mismatch" else "unfinished", faults=faults)
    if args.out:
        args.out.write_text(json.dumps(summary, indent=1) + "\n")
    for name, row in summary["acceptance_length"].items():
        print(f"{name:22}", *(f"{budget}: {value:.2f}" for budget, value in row.items()), sep="  ")
    print(json.dumps(summary))
    return 0 if summary["verdict"] in ("identical", "near_tie") else 1


if __name__ == "__main__":
    sys.exit(main())
