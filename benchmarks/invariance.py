"""Whether what a request says depends on its company and its budget: every prompt alone and plain, then in random traffic.

    python -m benchmarks.invariance --target T.gguf --drafter D --prompts ../shared/prompts --limit 64 --out invariance.json

Both engines take part, the usual one and the batch-invariant one, each compared with itself alone. In the traffic requests join
at random times, are cancelled at random, and each has a budget, greedy or drawn, of its own; prefixes are remembered, and pages
are few, so that some are preempted. Reported: answers that changed, where, and the time of the same traffic. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.equality import read_prompts


def requests_of(args) -> list:
    """Each prompt greedy and drawn, both at budget 0."""
    from ddtree.engine.request import Request
    from ddtree.sampling.params import SamplingParams
    from ddtree.text.chat import render_chat
    from ddtree.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.target)
    requests = []
    for number, prompt in enumerate(read_prompts(args.prompts)[: args.limit]):
        text = render_chat(tokenizer, [{"role": "user", "content": prompt["text"]}])
        token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(temperature=temperature)
            eos = frozenset(tokenizer.eos_token_ids)
            requests.append(Request(token_ids, args.max_tokens, sampling, seed=number, tree_budget=0, eos_token_ids=eos))
    return requests


def alone(engine, requests: list) -> list[list[int]]:
    """One after another, plain."""
    return [list(engine.generate(request).token_ids) for request in requests]


def in_traffic(engine, requests: list, budgets: list, seed: int) -> tuple[list[list[int]], dict]:
    """All of them in random order and company, at random budgets; a fifth more that are cancelled midway."""
    from dataclasses import replace

    rng = np.random.default_rng(seed)
    order = rng.permutation(len(requests)).tolist()
    extras = rng.choice(len(requests), len(requests) // 5, replace=False).tolist()
    queue = [(place, False) for place in order]
    for place in extras:
        queue.insert(int(rng.integers(len(queue) + 1)), (place, True))
    answers, ids, doomed, stats = [[] for _ in requests], {}, [], []
    started = time.perf_counter()
    while queue or engine.has_work:
        while queue and (not engine.has_work or rng.random() < 0.3):
            place, cancelled = queue.pop(0)
            budget = budgets[int(rng.integers(len(budgets)))]
            request_id = engine.add(replace(requests[place], tree_budget=budget))
            if cancelled:
                doomed.append(request_id)
            else:
                ids[request_id] = place
        for emission in engine.step():
            if emission.error:
                raise RuntimeError(emission.error)
            if emission.request_id in ids:
                answers[ids[emission.request_id]].extend(emission.token_ids)
                stats += [emission.stats] if emission.finish_reason else []
        if doomed and rng.random() < 0.05:
            engine.abort(doomed.pop(0))
    facts = {
        "seconds": round(time.perf_counter() - started, 2),
        "preemptions": sum(each.preemptions for each in stats),
        "cached_tokens": sum(each.cached_tokens for each in stats),
        "decode_rounds": sum(each.decode_rounds for each in stats),
    }
    return answers, facts


def first_difference(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def measure(args, batch_invariant: bool, requests: list) -> dict:
    """One engine: alone, then in traffic."""
    from ddtree.engine.loading import load_engine
    from ddtree.engine.measure import start_auto

    limits = {"max_running": args.max_running, "max_context": args.max_context, "max_tree_budget": max(args.budgets)}
    memory = {"cache_bytes": int(args.cache_memory * 2**30), "prefix_bytes": None}
    engine = load_engine(
        args.target, args.drafter, device=args.device, dtype=args.dtype, batch_invariant=batch_invariant, **limits, **memory
    )
    start_auto(engine, {"0.0": {"4": 2.5, "16": 3.3, "64": 4.2}})
    reference = alone(engine, requests)
    runs = []
    for seed in range(args.repeats):
        answers, facts = in_traffic(engine, requests, [*args.budgets, "auto"], seed)
        changed = [first_difference(a, b) for a, b in zip(reference, answers, strict=True) if a != b]
        runs.append({"seed": seed, "changed": len(changed), "first_differences": sorted(changed)[:10], **facts})
        print(f"batch-invariant {batch_invariant}, traffic {seed}: {len(changed)} of {len(requests)} changed, {facts}", flush=True)
    return {"tokens_alone": sum(map(len, reference)), "runs": runs}


def main() -> int:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--budgets", type=numbers, default=[0, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--max-context", type=int, default=1024)
    parser.add_argument("--cache-memory", type=float, default=0.25, metavar="GIB", help="so little that some are preempted")
    parser.add_argument("--only", choices=("usual", "batch-invariant"), help="(default: both engines)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    requests = requests_of(args)
    result = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "model": f"{args.target.name}, {args.drafter.name}",
        "dtype": args.dtype,
        "requests": len(requests),
        "command": "python -m benchmarks.invariance " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
    }
    for name in ("usual", "batch-invariant"):
        if args.only in (None, name):
            result[name] = measure(args, name == "batch-invariant", requests)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if any(run["changed"] for run in result.get("batch-invariant", {"runs": []})["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
