"""Requests that all come at once, from their arrival to their last token: prompts and rounds together, on one GPU.

    python -m benchmarks.burst --shapes qwen3.6-27b --concurrency 1,8,32 --prompt-tokens 128
    python -m benchmarks.burst --target T.gguf --drafter D --prompts P --concurrency 1,8,64

Each burst is C requests of `--answer-tokens` at one tree budget; the first two of a point capture and warm up, `--repeats` are counted.
Prints the first tokens' times (the median request's and the last one's) and tokens per second of the whole burst. Random weights draft
with a declared synthetic acceptance. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.throughput import add_pair, check_pair, make_engine, name_of_pair, prompts_of


def burst(engine, prompts: list, args) -> tuple[list[float], float, int]:
    """Seconds until each request's first token, until the last token of all, and how many tokens."""
    from ddtree.engine.request import Request
    from ddtree.sampling.params import SamplingParams

    sampling = SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    started, first, tokens = time.perf_counter(), {}, 0
    for place, prompt in enumerate(prompts):
        engine.add(Request(prompt, args.answer_tokens, sampling, tree_budget=args.budget, seed=place, cache_salt=None))
    while engine.has_work:
        for emission in engine.step():
            if emission.error:
                raise RuntimeError(emission.error)
            first.setdefault(emission.request_id, time.perf_counter() - started)
            tokens += len(emission.token_ids)
    return sorted(first.values()), time.perf_counter() - started, tokens


def point(engine, prompts: list, concurrency: int, args) -> dict:
    """One number of requests at once."""
    runs = []
    for repeat in range(args.repeats + 2):
        chosen = [prompts[(repeat * concurrency + i) % len(prompts)] for i in range(concurrency)]
        runs.append(burst(engine, chosen, args))
    figures = {
        "first_token_ms": [1000 * statistics.median(first) for first, _, _ in runs[2:]],
        "last_first_token_ms": [1000 * first[-1] for first, _, _ in runs[2:]],
        "tokens_per_s": [tokens / seconds for _, seconds, tokens in runs[2:]],
    }
    return {name: {"median": round(statistics.median(each), 2), "spread": [round(min(each), 2), round(max(each), 2)]} for name, each in figures.items()}


def main() -> int:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_pair(parser)
    parser.add_argument("--concurrency", type=numbers, default=[1, 8, 32])
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each random prompt")
    parser.add_argument("--prefill-chunk", type=int, default=2048, help="prompt tokens of a step, as a server on a GPU has them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--max-rows", type=int, default=4160)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    check_pair(parser, args)
    args.budgets, args.max_tree_budget = [args.budget], args.budget
    engine = make_engine(args)
    engine.config = replace(engine.config, prefill_chunk=args.prefill_chunk)
    prompts = prompts_of(args, engine)
    result = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "model": name_of_pair(args),
        "dtype": args.dtype,
        "command": "python -m benchmarks.burst " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
        "points": {},
    }
    for concurrency in args.concurrency:
        result["points"][str(concurrency)] = found = point(engine, prompts, concurrency, args)
        print(f"{concurrency:4} at once: " + "; ".join(f"{name} {figure['median']:.1f}" for name, figure in found.items()), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
