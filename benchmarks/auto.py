"""The auto budget against every fixed one, the chain and plain decoding: is it ever slower than the best of them?

    python -m benchmarks.auto --prompts ../shared/prompts --budgets 0,chain,2,4,6,8,16,64 --limit 12 --out auto.json

All configurations answer each prompt in turn, in an order that turns around, so that a drift of the machine hits all alike.
Per prompt set the best fixed configuration (plain and chain included) is chosen on one half of the prompts and compared with
on the other, and the halves then change places. A ratio is pooled: auto's tokens per second over the other's, over the same
prompts; its 95 % interval comes from a bootstrap over prompts. `reaches` says whether the interval reaches -3 %: its upper
end is at least 0.97, `holds` whether all of it lies above. A budget named with ":factorised" leaves the adapter out, and
`conditioned_over_factorised` compares it with itself. Decode speed: tokens after the first over the time of the rounds.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from benchmarks.equality import SEED, read_prompts
from benchmarks.speed import cpu_name, resident_bytes

DRAWS = 4000
FLOOR = 0.97
LEAST_TOKENS = 16  # shorter answers are left out: their speed says nothing
AUTO, CHAIN, PLAIN, FACTORISED = "auto", "chain", "0", ":factorised"


def main() -> int:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    engine, tokenizer, started_s = load(args)
    prompts = choose_prompts(args.prompts, args.sets, args.limit)
    named = [PLAIN if name == "plain" else name for name in args.budgets]
    configs = list(dict.fromkeys([PLAIN, *named, AUTO]))
    runs, skipped = measure(engine, tokenizer, prompts, configs, args)
    sets = {name: judge({p: r for p, r in runs.items() if r["set"] == name}, configs) for name in dict.fromkeys(p["set"] for p in prompts)}
    sets = {name: row for name, row in sets.items() if row}
    result = {
        "sets": sets,
        "all": judge(runs, configs),
        "settings": {name: str(value) for name, value in vars(args).items() if name not in ("out", "prompts")},
        "answers_skipped": skipped,
        "answers_that_differ_from_plain": [[p, c] for p, row in runs.items() for c in configs if c in row["differs"]],
        "cost_model": engine.auto.cost.as_json() if hasattr(engine.auto, "cost") else engine.auto.describe(),
        "start_s": started_s,
        "device": torch.cuda.get_device_name() if engine.target.device.type == "cuda" else cpu_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(engine.target.model.dtype).removeprefix("torch."),
        "peak_resident_bytes": resident_bytes(),
        "command": "python -m benchmarks.auto " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
    }
    show(result, configs)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def parse() -> argparse.Namespace:
    names = lambda text: [part.strip() for part in text.split(",") if part.strip()]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--sets", type=names, help="of the folder's; default: all")
    parser.add_argument("--budgets", type=names, default=names("chain,2,4,6,8,16,64"))
    parser.add_argument("--limit", type=int, default=10, help="prompts of each set")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--measure-s", type=float, default=8.0, help="time for the cost model, which is not read from the cache")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name in args.budgets:
        if ":" in name and not name.endswith(FACTORISED):
            parser.error(f"--budgets: {name!r} is no configuration; the only suffix is {FACTORISED!r}")
    return args


def load(args):
    """The engine; the tokenizer; seconds to load and to measure."""
    from ddtree.cli.loaded import acceptance_of, card_of
    from ddtree.engine.loading import load_engine
    from ddtree.engine.measure import start_auto
    from ddtree.sources import resolve
    from ddtree.text import Tokenizer

    begun = time.perf_counter()
    source = resolve(args.model, args.drafter)
    engine = load_engine(source.target, source.drafter, device=args.device, dtype=args.dtype, max_context=args.max_context)
    loaded = time.perf_counter()
    start_auto(engine, acceptance_of(source.drafter, engine), limit_s=args.measure_s, drafter_card=card_of(source.drafter))
    seconds = {"load": round(loaded - begun, 2), "measure": round(time.perf_counter() - loaded, 2)}
    return engine, Tokenizer.load(source.target), seconds


def choose_prompts(folder: Path, sets: list[str] | None, limit: int) -> list[dict]:
    """The first `limit` prompts of each set, the sets in turn."""
    by_set = defaultdict(list)
    for prompt in read_prompts(folder):
        if (not sets or prompt["set"] in sets) and len(by_set[prompt["set"]]) < limit:
            by_set[prompt["set"]].append(prompt)
    return [row[i] for i in range(limit) for row in by_set.values() if i < len(row)]


def measure(engine, tokenizer, prompts: list[dict], configs: list[str], args) -> tuple[dict, list[str]]:
    """Tokens and seconds by prompt and configuration: runs[id] = {"set", config: [tokens, seconds, nodes, rounds], "differs"}."""
    runs, skipped = {}, []
    for number, prompt in enumerate([*prompts[:2], *prompts]):
        row = {"set": prompt["set"], "differs": []} | {config: np.zeros(4) for config in configs}
        plain = None
        for repeat in range(args.repeats):
            order = configs[(number + repeat) % len(configs) :] + configs[: (number + repeat) % len(configs)]
            written = {}
            for config in order if (number + repeat) % 2 else order[::-1]:
                token_ids, stats = answer(engine, tokenizer, prompt["text"], config, args)
                written[config] = token_ids
                row[config] += [stats.output_tokens - 1, stats.decode_s, stats.nodes_verified, stats.decode_rounds]
            plain = written[PLAIN]
            row["differs"] += [config for config in configs if written[config] != plain]
        if number < 2:
            continue  # warm-up; also auto's first impressions
        if len(plain) < LEAST_TOKENS:
            skipped.append(prompt["id"])
        else:
            runs[prompt["id"]] = row
        speeds = "  ".join(f"{config} {row[config][0] / max(row[config][1], 1e-9):.1f}" for config in configs)
        print(f"{number - 1} of {len(prompts)}  {prompt['id']}  {speeds}", flush=True)
    return runs, skipped


def answer(engine, tokenizer, text: str, config: str, args):
    from ddtree.engine.request import Request
    from ddtree.sampling.params import SamplingParams
    from ddtree.text.chat import render_chat

    rendered = render_chat(tokenizer, [{"role": "user", "content": text}])
    prompt = tuple(tokenizer.encode(rendered, add_special_tokens=False))
    config, _, without = config.partition(":")
    chain = config == CHAIN
    budget = AUTO if config == AUTO else engine.block_size - 1 if chain else int(config)
    sampling = SamplingParams(temperature=args.temperature, top_p=args.top_p)
    eos = frozenset(tokenizer.eos_token_ids)
    emission = engine.generate(Request(
        prompt, args.max_tokens, sampling, SEED, tree_budget=budget, eos_token_ids=eos, scoring="factorised" if without else None,
        chain=chain,
    ))
    return emission.token_ids, emission.stats


def judge(runs: dict, configs: list[str]) -> dict | None:
    """What the runs of a set say: every configuration's speed, and auto against the best fixed one and against plain."""
    if len(runs) < 2:
        return None
    table = {config: np.array([row[config] for row in runs.values()]) for config in configs}  # [prompts, 4]
    fixed = [config for config in configs if not config.startswith(AUTO)]
    pairs = [config for config in configs if config + FACTORISED in configs]
    halves = [np.arange(len(runs)) % 2 == 0, np.arange(len(runs)) % 2 == 1]
    best = [max(fixed, key=lambda config, other=halves[1 - i]: speed(table[config][other])) for i in (0, 1)]
    rival = np.where(halves[0][:, None], table[best[0]], table[best[1]])
    auto = table[AUTO]
    return {
        "prompts": len(runs),
        "tokens_per_s": {config: round(float(speed(rows)), 3) for config, rows in table.items()},
        "acceptance_length": {config: round(float(rows[:, 0].sum() / rows[:, 3].sum()), 3) for config, rows in table.items()},
        "auto_nodes_per_round": round(float(auto[:, 2].sum() / auto[:, 3].sum()), 2),
        "best_fixed": max(fixed, key=lambda config: speed(table[config])),
        "best_of_the_other_half": best,
        "auto_over_best": compare(auto, rival),
        "auto_over_plain": compare(auto, table[PLAIN]),
        "conditioned_over_factorised": {
            config: compare(table[config], table[config + FACTORISED])
            | {"acceptance": round(float(lengths(table[config]) / lengths(table[config + FACTORISED])), 4)}
            for config in pairs
        },
        "auto_over_each": {config: round(float(speed(auto) / speed(table[config])), 4) for config in fixed},
    }


def lengths(rows: np.ndarray) -> float:
    """Pooled tokens per round of rows [n, 4]."""
    return rows[:, 0].sum() / rows[:, 3].sum()


def speed(rows: np.ndarray) -> float:
    """Pooled tokens per second of rows [n, 4]."""
    return rows[:, 0].sum() / rows[:, 1].sum()


def compare(ours: np.ndarray, theirs: np.ndarray) -> dict:
    """The pooled ratio of speeds on the same prompts, and where 95 % of the bootstrap's lie."""
    picks = np.random.default_rng(SEED).integers(len(ours), size=(DRAWS, len(ours)))
    drawn = ours[picks].sum(1), theirs[picks].sum(1)
    ratios = drawn[0][:, 0] / drawn[0][:, 1] * drawn[1][:, 1] / drawn[1][:, 0]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return {
        "ratio": round(float(speed(ours) / speed(theirs)), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "reaches": bool(high >= FLOOR),
        "holds": bool(low >= FLOOR),
    }


def show(result: dict, configs: list[str]) -> None:
    """The table for people."""
    print(f"\n{'set':12}{'prompts':>8}", *(f"{config:>8}" for config in configs), "   auto / best of the other half   auto / plain")
    for name, row in [*result["sets"].items(), ("all", result["all"])]:
        if row is None:
            continue
        ratios = [f"{row[key]['ratio']:.3f} [{row[key]['interval'][0]:.3f}, {row[key]['interval'][1]:.3f}]" for key in ("auto_over_best", "auto_over_plain")]
        speeds = "".join(f" {row['tokens_per_s'][config]:8.2f}" for config in configs)
        print(f"{name:12}{row['prompts']:8}{speeds}   {ratios[0]} ({', '.join(row['best_of_the_other_half'])})   {ratios[1]}")


if __name__ == "__main__":
    sys.exit(main())
