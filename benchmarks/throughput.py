"""Throughput and per-user speed at rising concurrency: plain, fixed budgets and auto, interleaved, on one GPU.

    python -m benchmarks.throughput --shapes qwen3.6-27b --out load.json        # random weights, declared synthetic acceptance
    python -m benchmarks.throughput --target T.gguf --drafter D --prompts P      # a real pair, real acceptance

A run holds C requests that are all decoding and counts what `--seconds` of rounds emit; prefill is outside the clock. Each point is
run `--repeats` times, all modes in turn. The best fixed budget is chosen on the even runs and auto is compared with it on the odd
ones. `--answer-tokens 128` keeps a real pair's text within answers: past their ends it repeats itself. The last line is JSON; `--plot`
draws the curve.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.shapes import PAIRS

PREFILL_CHUNK = 16384  # prompt tokens of a step: all prompts go at once, so that no rounds of fewer requests are captured


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Which pair runs: random weights of known shapes, or a real one and its prompts."""
    parser.add_argument("--shapes", choices=PAIRS)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--adapter", default="auto", help='a folder, or "none"')


def check_pair(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error where no pair is named whole."""
    if not args.shapes and not (args.target and args.drafter and args.prompts):
        parser.error("give --shapes, or --target, --drafter and --prompts")


def name_of_pair(args: argparse.Namespace) -> str:
    """The pair in words, and whose acceptance it is."""
    return f"{args.shapes}, random weights, synthetic acceptance" if args.shapes else f"{args.target.name}, {args.drafter.name}, real acceptance"


def make_engine(args):
    """An engine over pools for the largest concurrency; synthetic rounds where the weights are random."""
    from ddtree.engine.config import EngineConfig
    from ddtree.engine.device_rounds import DeviceRounds
    from ddtree.engine.pooled import pooled_engine

    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    most = max(args.concurrency)
    if args.shapes:
        from benchmarks.shapes import random_pair
        from benchmarks.synthetic import SyntheticRound

        target, drafter = random_pair(args.shapes, device, dtype)
    else:
        from ddtree.models.dflash import load_drafter
        from ddtree.models.registry import load_target

        target = load_target(args.target, device, dtype)
        drafter = load_drafter(args.drafter, target.config, device, dtype)
    limit = min(args.max_context, target.config.context_limit)
    config = EngineConfig(
        max_context=limit, max_tree_budget=max(args.max_tree_budget, *args.budgets), max_running=most, batch_invariant=args.batch_invariant,
        prefill_chunk=PREFILL_CHUNK,
    )  # fmt: skip
    rows = most * (1 + max(args.budgets))
    from ddtree.engine.loading import load_conditioning

    conditioning = None if args.shapes else load_conditioning(args.adapter, args.drafter, drafter, target)
    engine = pooled_engine(target, drafter, config, max_rows=min(rows, args.max_rows), conditioning=conditioning)
    if args.shapes:
        engine.device_rounds = DeviceRounds(engine.device_rounds.state, round_type=SyntheticRound)
    return engine


def compile_rounds(engine, concurrency: int, budgets: list[int]) -> None:
    """Compile what so many requests will launch side by side, before it is captured one by one."""
    from ddtree.engine.device_round import RoundShape
    from ddtree.engine.device_rounds import BATCHES
    from ddtree.engine.graphs import bucket_of

    rounds, count = engine.device_rounds, bucket_of(concurrency, BATCHES)
    fitting = [b for b in {*engine.auto.ladder, *budgets} if b and count * (1 + b) <= rounds.state.max_rows]
    kinds = (False, True) if rounds.state.conditioning is not None else (False,)
    shapes = [RoundShape(count, 0), *(RoundShape(count, b, conditioned=kind) for b in fitting for kind in kinds)]
    rounds.compile_ahead(shapes, engine.config.prefill_chunk)


def prompts_of(args, engine) -> list[tuple[int, ...]]:
    """Random tokens for random weights; else the real prompts in turn."""
    if args.shapes:
        generator = torch.Generator().manual_seed(0)
        shape = (max(args.concurrency), args.prompt_tokens)
        return [tuple(row) for row in torch.randint(0, engine.vocab_size - 1, shape, generator=generator).tolist()]
    from benchmarks.equality import read_prompts
    from ddtree.text.chat import render_chat
    from ddtree.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.target)
    texts = [render_chat(tokenizer, [{"role": "user", "content": p["text"]}]) for p in read_prompts(args.prompts)]
    return [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def run(engine, prompts: list, mode, concurrency: int, seconds: float, offset: int, answer_tokens: int | None = None) -> dict:
    """Rounds for `seconds`, of requests that all decode: tokens per second in all, rounds, acceptance. With `answer_tokens` the
    requests make room for the next prompts as soon as one has said so many."""
    total, parts = Counter(), 0
    while not parts or (answer_tokens and total["seconds"] < seconds):
        chosen = [prompts[(offset + parts * concurrency + i) % len(prompts)] for i in range(concurrency)]
        total.update(burst(engine, chosen, mode, seconds - total["seconds"], answer_tokens))
        parts += 1
    return {
        "tokens_per_s": total["tokens"] / total["seconds"],
        "round_ms": 1000 * total["seconds"] / max(total["steps"], 1),
        "acceptance_length": total["tokens"] / max(total["rounds"], 1),
        "nodes": total["nodes"] / max(total["rounds"], 1),
        "ended_early": total["seconds"] < seconds,
    }


def burst(engine, prompts: list, mode, seconds: float, answer_tokens: int | None) -> dict:
    """All prompts prefilled, then rounds until the time is up, a request ends or the first has said `answer_tokens`; what came of it."""
    from ddtree.engine.request import Request

    room = engine.config.max_context - max(map(len, prompts)) - 1
    ids = [engine.add(Request(prompt, max_tokens=room, tree_budget=mode, seed=i)) for i, prompt in enumerate(prompts)]

    def running() -> list:
        return [s for s in (engine.running_or_none(i) for i in ids) if s is not None]

    def counts(sequences: list) -> dict:
        fields = {"tokens": "output_tokens", "rounds": "decode_rounds", "nodes": "nodes_verified"}
        return {name: sum(getattr(s.stats, field) for s in sequences) for name, field in fields.items()}

    while len(running()) < len(ids) or any(s.stats.output_tokens < 2 for s in running()):
        engine.step()
    sequences = running()
    said = [s.stats.output_tokens for s in sequences]

    def goes_on() -> bool:
        longest = max(s.stats.output_tokens - first for s, first in zip(sequences, said, strict=True))
        return len(running()) == len(ids) and longest < (answer_tokens or room)

    before, started, steps = counts(sequences), time.perf_counter(), 0
    while time.perf_counter() - started < seconds and goes_on():
        engine.step()
        steps += 1
    elapsed, after = time.perf_counter() - started, counts(sequences)
    for request_id in ids:
        engine.abort(request_id)
    if engine.device_rounds is not None:
        engine.device_rounds.drain()
    return {name: after[name] - before[name] for name in after} | {"seconds": elapsed, "steps": steps}


def main() -> int:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_pair(parser)
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--budgets", type=numbers, default=[16, 64])
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--answer-tokens", type=int, help="so long are answers, then come the next prompts (default: to the context's end)")
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of each random prompt")
    parser.add_argument("--max-tree-budget", type=int, default=64, help="most that auto may choose")
    parser.add_argument("--max-rows", type=int, default=4160)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-invariant", action="store_true", help="the forwards whose rows do not know their company")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after the concurrency in which this is reached")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    check_pair(parser, args)
    if args.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {args.repeats}: the best budget is chosen on one half of the runs")
    from ddtree.cli.loaded import acceptance_of, card_of
    from ddtree.engine.measure import start_auto

    begun = time.perf_counter()
    engine = make_engine(args)
    if args.shapes:
        start_auto(engine, {"0.0": {"4": 2.5, "16": 3.3, "64": 4.2}}, prepare=False)
    else:
        start_auto(engine, acceptance_of(args.drafter, engine), drafter_card=card_of(args.drafter), prepare=False)
    prompts, modes = prompts_of(args, engine), [0, *args.budgets, "auto"]
    result = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "model": name_of_pair(args),
        "dtype": args.dtype,
        "batch_invariant": args.batch_invariant,
        "command": "python -m benchmarks.throughput " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
        "points": {},
    }
    for concurrency in args.concurrency:
        compile_rounds(engine, concurrency, args.budgets)
        for mode in modes:  # captures and warms up
            run(engine, prompts, mode, concurrency, 0.2, 0, args.answer_tokens)
        runs = {str(mode): [] for mode in modes}
        for repeat in range(args.repeats):
            for mode in modes if repeat % 2 else modes[::-1]:
                runs[str(mode)].append(run(engine, prompts, mode, concurrency, args.seconds, repeat * concurrency, args.answer_tokens))
        result["points"][str(concurrency)] = point = summary(runs, concurrency)
        print(f"{concurrency:4} at once: " + "; ".join(f"{m} {p['tokens_per_s']['median']:.0f}" for m, p in point["modes"].items()), end="; ")
        print(f"auto over the best fixed ({point['best_fixed']}): {point['auto_over_best']}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        if time.perf_counter() - begun > 60 * args.minutes:
            result["stopped"] = f"after concurrency {concurrency}: {args.minutes} minutes were up"
            break
    first = result["points"].get("1")
    if first and "8" in result["points"]:
        serial = first["modes"]["auto"]["tokens_per_s"]["median"]
        result["eight_over_serial"] = round(result["points"]["8"]["modes"]["auto"]["tokens_per_s"]["median"] / serial, 3)
    result["peak_bytes"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    if args.plot:
        plot(result, args.plot)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def summary(runs: dict, concurrency: int) -> dict:
    """Medians with their range; auto against the best fixed budget, chosen on the even runs and compared on the odd ones."""
    modes = {}
    for mode, each in runs.items():
        speeds = [r["tokens_per_s"] for r in each]
        modes[mode] = {
            "tokens_per_s": {"median": round(statistics.median(speeds), 1), "spread": [round(min(speeds), 1), round(max(speeds), 1)]},
            "per_user": round(statistics.median(speeds) / concurrency, 2),
            "round_ms": round(statistics.median(r["round_ms"] for r in each), 3),
            "acceptance_length": round(statistics.mean(r["acceptance_length"] for r in each), 3),
            "nodes": round(statistics.mean(r["nodes"] for r in each), 1),
            "ended_early": sum(r["ended_early"] for r in each),
        }
    fixed = [mode for mode in runs if mode != "auto"]

    def mean(mode: str, half: int) -> float:
        return statistics.mean(r["tokens_per_s"] for r in runs[mode][half::2])

    best = max(fixed, key=lambda mode: mean(mode, 0))
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(runs["auto"][1::2], runs[best][1::2], strict=True)]
    return {"modes": modes, "best_fixed": best, "auto_over_best": round(statistics.mean(ratios), 4), "auto_over_best_runs": [round(r, 4) for r in ratios]}


def plot(result: dict, path: Path) -> None:
    """Tokens per second in all, and per user, against concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = {int(c): p for c, p in result["points"].items()}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4))
    for mode in next(iter(points.values()))["modes"]:
        label = {"0": "plain", "auto": "auto"}.get(mode, f"budget {mode}")
        total = [p["modes"][mode]["tokens_per_s"]["median"] for p in points.values()]
        style = {"linewidth": 2.4, "zorder": 3} if mode == "auto" else {"linewidth": 1.2, "linestyle": "--"}
        axes[0].plot(list(points), total, marker="o", label=label, **style)
        axes[1].plot(list(points), [t / c for t, c in zip(total, points, strict=True)], marker="o", label=label, **style)
    for axis, title in zip(axes, ("tokens/s, all requests", "tokens/s per request"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="requests at once", title=title)
        axis.set_xticks(list(points), [str(c) for c in points])
        axis.grid(alpha=0.3, which="both")
    axes[0].legend()
    figure.suptitle(f"{result['model']}, {result['dtype']}, {result['card']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
