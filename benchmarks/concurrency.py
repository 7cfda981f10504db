"""Throughput of the eager engine by concurrency: plain, a fixed budget and auto, one forward for all; on a CPU by default.

    python -m benchmarks.concurrency --prompts ../shared/prompts --concurrency 1,2,4,8 --out concurrency.json

Each point runs `--requests` requests of `--max-tokens` tokens (EOS ignored), C of them side by side from the first to the last, through
the engine's own admission; tokens per second are all emitted tokens over the wall time of the steps in which C were running, so
that neither the first prefill nor the thinning end is counted. Modes take turns in an order that turns around. Every answer is
compared with plain decoding alone; what differs is listed. Also: target forwards and rounds, which are the same number. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.equality import read_prompts
from benchmarks.speed import cpu_name

AUTO = "auto"


def main() -> int:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    engine, prompts = load(args)
    plain = {prompt: list(engine.generate(request(prompt, 0, args.max_tokens)).token_ids) for prompt in prompts}
    points, differing = defaultdict(list), []
    for repeat in range(args.repeats):
        for concurrency in args.concurrency:
            for mode in args.modes if repeat % 2 else args.modes[::-1]:
                point = run(engine, prompts, mode, concurrency, args, plain)
                differing += point.pop("differing")
                points[f"{mode} x {concurrency}"].append(point)
                print(f"{mode} x {concurrency}: {json.dumps(point)}", flush=True)
    result = {
        "tokens_per_s": {name: round(statistics.median(p["tokens_per_s"] for p in found), 2) for name, found in points.items()},
        "points": points,
        "answers_that_differ_from_plain_alone": differing,
        "settings": {name: value for name, value in vars(args).items() if name not in ("out", "prompts")},
        "device": cpu_name() if engine.target.device.type == "cpu" else torch.cuda.get_device_name(),
        "load_average": os.getloadavg(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "command": "python -m benchmarks.concurrency " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["plain", "8", AUTO])
    parser.add_argument("--requests", type=int, default=16, help="of one point, at least twice the concurrency")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--measure-s", type=float, default=8.0, help="time for the cost model, which is not read from the cache")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def load(args):
    """The engine, and the prompts' token ids."""
    from ddtree.cli.loaded import acceptance_of
    from ddtree.engine.loading import load_engine
    from ddtree.engine.measure import start_auto
    from ddtree.sources import resolve
    from ddtree.text import Tokenizer
    from ddtree.text.chat import render_chat

    source = resolve(args.model, args.drafter)
    engine = load_engine(source.target, source.drafter, device=args.device, dtype="float32", max_context=2048)
    if AUTO in args.modes:
        start_auto(engine, acceptance_of(source.drafter), limit_s=args.measure_s)
    tokenizer = Tokenizer.load(source.target)
    texts = [prompt["text"] for prompt in read_prompts(args.prompts)]
    step = max(len(texts) // args.requests, 1)
    rendered = [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in texts[::step][: args.requests]]
    prompts = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in rendered]
    return engine, [prompt for prompt in prompts if len(prompt) + args.max_tokens < 2048]


def request(prompt: tuple[int, ...], mode: str | int, max_tokens: int):
    from ddtree.engine.request import Request

    return Request(prompt, max_tokens, tree_budget=mode if mode == AUTO else 0 if mode == "plain" else int(mode))


def run(engine, prompts, mode: str, concurrency: int, args, plain) -> dict:
    """One point of the curve."""
    engine.config = replace(engine.config, max_running=concurrency)
    forwards, verify = 0, engine.target.verify

    def counted(sequences, trees):
        nonlocal forwards
        forwards += 1
        return verify(sequences, trees)

    engine.target.verify = counted
    try:
        ids = {engine.add(request(prompt, mode, args.max_tokens)): prompt for prompt in prompts}
        written, stats, seconds, counted_tokens, rounds = defaultdict(list), [], 0.0, 0, 0
        while engine.has_work:
            full, before, started = engine.num_waiting > 0 or len(engine.scheduler.decoding) == concurrency, forwards, time.perf_counter()
            emissions = engine.step()
            elapsed = time.perf_counter() - started
            rounds += forwards > before
            if full and written:
                seconds += elapsed
                counted_tokens += sum(len(emission.token_ids) for emission in emissions)
            for emission in emissions:
                written[emission.request_id].extend(emission.token_ids)
                stats += [emission.stats] if emission.stats else []
    finally:
        engine.target.verify = verify
    return {
        "tokens_per_s": round(counted_tokens / seconds, 2),
        "mean_nodes": round(sum(s.nodes_verified for s in stats) / sum(s.decode_rounds for s in stats), 2),
        "mean_acceptance_length": round(sum(s.output_tokens - 1 for s in stats) / sum(s.decode_rounds for s in stats), 3),
        "target_forwards": forwards,
        "rounds": rounds,
        "requests_per_forward": round(sum(s.decode_rounds for s in stats) / forwards, 2),
        "differing": [[ids[i][:8], mode, concurrency] for i, tokens in written.items() if tokens != plain[ids[i]]],
    }


if __name__ == "__main__":
    sys.exit(main())
