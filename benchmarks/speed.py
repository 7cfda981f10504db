"""Tokens per second, plain and with trees, paired: every budget on the same prompts, in turn, in one process.

    python -m benchmarks.speed --target FILE.gguf --drafter FOLDER --prompts ../shared/prompts --budgets 0,4,8,16

Decode speed only: tokens after the first over the time of the decode rounds, pooled over the prompts of a repeat; medians and
spread are over repeats. The baseline is budget 0 through the same path. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.equality import SEED, read_prompts


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def spread(values: list[float]) -> dict:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.open() if line.startswith("model name")] if info.exists() else []
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def measure(engine, tokenizer, args) -> dict:
    """Tokens, seconds and rounds per repeat and budget."""
    from ddtree.engine.request import Request
    from ddtree.sampling.params import SamplingParams
    from ddtree.text.chat import render_chat

    sampling = SamplingParams(temperature=args.temperature, top_p=args.top_p)
    prompts = read_prompts(args.prompts)[: args.limit]
    encoded = [
        tuple(tokenizer.encode(render_chat(tokenizer, [{"role": "user", "content": p["text"]}]), add_special_tokens=False))
        for p in prompts
    ]
    runs = {budget: [] for budget in args.budgets}
    for repeat in range(-1, args.repeats):
        totals = {budget: [0, 0.0, 0, 0, {}] for budget in args.budgets}
        for number, prompt in enumerate(encoded if repeat >= 0 else encoded[:2]):
            order = args.budgets if (number + repeat) % 2 else args.budgets[::-1]
            for budget in order:
                request = Request(
                    prompt, args.max_tokens, sampling, SEED, tree_budget=budget, eos_token_ids=frozenset(tokenizer.eos_token_ids)
                )
                stats = engine.generate(request).stats
                total = totals[budget]
                total[0] += stats.output_tokens - 1
                total[1] += stats.decode_s
                total[2] += stats.decode_rounds
                total[3] += stats.output_tokens - 1 + stats.trimmed_tokens
                for stage in ("draft", "build", "verify", "accept", "commit"):
                    total[4][stage] = total[4].get(stage, 0.0) + getattr(stats, f"{stage}_s")
        if repeat >= 0:  # the first pass warms up
            for budget in args.budgets:
                runs[budget].append(totals[budget])
        print(f"repeat {repeat + 1} of {args.repeats}", flush=True)
    return runs


def main() -> int:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--budgets", type=numbers, default=[0, 4, 8, 16, 64])
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    from ddtree.engine.loading import load_engine
    from ddtree.text.tokenizer import Tokenizer

    started = time.perf_counter()
    engine = load_engine(args.target, args.drafter, device=args.device, dtype=args.dtype)
    loaded = time.perf_counter() - started
    runs = measure(engine, Tokenizer.load(Path(args.target)), args)
    cuda = engine.target.device.type == "cuda"
    plain = [total[0] / total[1] for total in runs[args.budgets[0]]]
    rows = {}
    for budget, totals in runs.items():
        speeds = [total[0] / total[1] for total in totals]
        rounds = sum(total[2] for total in totals)
        rows[str(budget)] = {
            "tokens_per_s": spread(speeds),
            "speedup": spread([speed / base for speed, base in zip(speeds, plain, strict=True)]),
            "acceptance_length": round(sum(total[3] for total in totals) / rounds, 3),
            "round_ms": round(1000 * sum(total[1] for total in totals) / rounds, 3),
            "stage_ms": {s: round(1000 * sum(t[4][s] for t in totals) / rounds, 3) for s in totals[0][4]},
        }
        print(f"budget {budget:5}  {rows[str(budget)]}")
    result = {
        "card": torch.cuda.get_device_name() if cuda else cpu_name(),
        "torch": torch.__version__,
        "dtype": str(next(engine.target.model.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "temperature": args.temperature,
        "top_p": args.top_p,
        "prompts": args.limit,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "budgets": rows,
        "load_s": round(loaded, 2),
        "device_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "resident_bytes": resident_bytes(),
        "command": "python -m benchmarks.speed " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
