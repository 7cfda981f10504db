"""SGLang with the DDTREE plugin beside plain SGLang and our own engine: tokens per second, acceptance length, tokens compared.

    python -m benchmarks.sglang_budgets ask http://127.0.0.1:30000 --model FOLDER --concurrency 1,8 --out plain.json
    python -m benchmarks.sglang_budgets ask http://127.0.0.1:30001 --model FOLDER --trace rounds.jsonl --against plain.json --out 16.json
    python -m benchmarks.sglang_budgets ours --model FOLDER --drafter FOLDER --budgets 16,64 --against plain.json --out ours.json
    python -m benchmarks.sglang_budgets hf --model FOLDER --answers plain.json,16.json --device cuda --out hf.json

A server's tree budget is that of its start; `--budget` asks for a smaller one, in the server's padded trees. `--trace` is the file
of its SGLANG_DDTREE_TRACE, from which paths through a child that is not its parent's first are counted, and stage times averaged.
`render` writes the prompts' token ids, from which `--rendered` asks without importing anything.
`hf` has transformers read each answer of these files in one fp32 forward: greedy answers are its own best token everywhere. Prompts are chats.
Each run is written as soon as it is done, so that a run cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WARM_TOKENS = 24


def rendered(args: argparse.Namespace) -> list[list[int]]:
    """The token ids of each prompt's first turn as a chat: those of `--rendered`, or of `--prompts` by the model's template."""
    if args.rendered is not None:
        return json.loads(args.rendered.read_text())[: args.limit]
    from ddtree.bench.workloads import load_prompts
    from ddtree.text import Tokenizer, render_chat

    tokenizer = Tokenizer.load(args.model)
    turns = [prompt.turns[0] for prompt in load_prompts(args.prompts, args.limit)]
    chats = [render_chat(tokenizer, [{"role": "user", "content": turn}]) for turn in turns]
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


def answer(args: argparse.Namespace, prompt: list[int], max_tokens: int) -> dict:
    """SGLang's answer to one prompt."""
    params = {"temperature": args.temperature, "top_p": args.top_p, "max_new_tokens": max_tokens}
    if args.seed is not None:
        params["sampling_seed"] = args.seed
    if args.budget is not None:
        params["custom_params"] = {"tree_budget": args.budget}
    body = json.dumps({"input_ids": prompt, "sampling_params": params}).encode()
    request = urllib.request.Request(f"{args.url}/generate", body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))


def files_named(names: str) -> list[Path]:
    return [Path(name) for name in names.split(",")]


def trace_lines(path: Path | None) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def mean_times(lines: list[dict]) -> dict:
    """Mean milliseconds of a round, of what SGLang does between two (the shortest nine tenths: idle servers wait), and of the stages."""
    rounds = list({line["round"]: line for line in lines if "round" in line}.values())
    if not rounds:
        return {}
    between = sorted(each["between_ms"] for each in rounds)[: max(len(rounds) * 9 // 10, 1)]
    took = [each["round_ms"] for each in rounds]
    means = {"round_ms": took, "between_ms": between}
    stages = {name: [each["stage_ms"][name] for each in rounds] for name in rounds[0]["stage_ms"]}
    shown = {name: round(sum(values) / len(values), 3) for name, values in means.items()}
    prefills = [each["prefill_ms"] for each in rounds if each.get("prefill_ms")]
    for part in prefills[0] if prefills else ():
        shown[f"prefill_{part}_ms"] = round(sum(each[part] for each in prefills) / len(prefills), 3)
    shown["median_round_ms"] = sorted(took)[len(took) // 2]
    return shown | {"stage_ms": {name: round(sum(values) / len(values), 3) for name, values in stages.items()}}


def run_served(args: argparse.Namespace, prompts: list[list[int]], concurrency: int) -> dict:
    """All prompts, `concurrency` at a time. The first token of an answer is the prefill's, so it is in no round."""
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda prompt: answer(args, prompt, WARM_TOKENS), prompts[: max(concurrency, 2)]))
        before, started = len(trace_lines(args.trace)), time.perf_counter()
        answers = list(pool.map(lambda prompt: answer(args, prompt, args.max_tokens), prompts))
        seconds = time.perf_counter() - started
    tokens = sum(each["meta_info"]["completion_tokens"] for each in answers)
    rounds = sum(each["meta_info"].get("spec_verify_ct") or 0 for each in answers)
    paths = trace_lines(args.trace)[before:]
    return {
        "concurrency": concurrency,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "rounds": rounds,
        "acceptance_length": (tokens - len(answers)) / rounds if rounds else None,
        "traced_rounds": len(paths),
        "traced_acceptance_length": sum(each["acceptance_length"] for each in paths) / len(paths) if paths else None,
        "paths_through_a_later_child": sum(not each["first_children"] for each in paths),
        **mean_times(paths),
        "rounds_of_answers": [each["meta_info"].get("spec_verify_ct") or 0 for each in answers],
        "answers": [each["output_ids"] for each in answers],
    }


def run_ours(args: argparse.Namespace, prompts: list[list[int]], budget: int, engine, eos: frozenset[int]) -> dict:
    """The same prompts in our own engine, one after another."""
    from ddtree.engine.request import Request
    from ddtree.sampling.params import SamplingParams

    sampling = SamplingParams(args.temperature)
    requests = [
        Request(tuple(prompt), args.max_tokens, sampling, args.seed or 0, tree_budget=budget, eos_token_ids=eos)
        for prompt in prompts
    ]
    engine.generate(requests[0])  # warm
    started = time.perf_counter()
    found = [engine.generate(request) for request in requests]
    seconds = time.perf_counter() - started
    tokens, rounds = sum(len(each.token_ids) for each in found), sum(each.stats.decode_rounds for each in found)
    lengths = [(each.stats.mean_acceptance_length or 0) * each.stats.decode_rounds for each in found]
    return {
        "budget": budget,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "rounds": rounds,
        "acceptance_length": sum(lengths) / rounds if rounds else None,
        "rounds_of_answers": [each.stats.decode_rounds for each in found],
        "answers": [list(each.token_ids) for each in found],
    }


def compare(runs: list[dict], against: list[Path]) -> None:
    """Add to each run how many answers equal those of the first run in the first of `against`, where the others part, and beside
    each file the rounds of those answers that are the same: [this run's, that one's] of so many answers."""
    files = [(path, json.loads(path.read_text())["runs"][0]) for path in against if path.exists()]
    for run in runs if files else ():
        pairs = list(zip(run["answers"], files[0][1]["answers"], strict=False))
        parts = [_first_difference(*pair) for pair in pairs]
        run["equal_answers"], run["compared_answers"] = sum(part is None for part in parts), len(parts)
        run["first_differences"] = [part for part in parts if part is not None]
        run["rounds_beside"] = {path.stem: _rounds_of_equal(run, other) for path, other in files}


def _rounds_of_equal(run: dict, other: dict) -> dict:
    columns = (run["answers"], other["answers"], run["rounds_of_answers"], other["rounds_of_answers"])
    rounds = [counts for found, expected, *counts in zip(*columns, strict=False) if found == expected]
    return {"answers": len(rounds), "rounds": [sum(column) for column in zip(*rounds, strict=True)]}


def _first_difference(found: list[int], expected: list[int]) -> int | None:
    both = min(len(found), len(expected))
    different = [at for at in range(both) if found[at] != expected[at]]
    return different[0] if different else (None if len(found) == len(expected) else both)


def report(args: argparse.Namespace, runs: list[dict]) -> None:
    """A line about the newest run, and all of them into the file."""
    compare(runs, args.against)
    shown = {name: value for name, value in runs[-1].items() if name not in ("answers", "first_differences", "rounds_of_answers")}
    print(json.dumps(shown), flush=True)
    asked = {name: str(value) for name, value in vars(args).items() if name != "run"}
    args.out.write_text(json.dumps({"asked": asked, "runs": runs}))


def ask(args: argparse.Namespace) -> None:
    prompts, runs = rendered(args), []
    for concurrency in args.concurrency.split(","):
        runs.append(run_served(args, prompts, int(concurrency)))
        report(args, runs)


def render(args: argparse.Namespace) -> None:
    args.out.write_text(json.dumps(rendered(args)))


def ours(args: argparse.Namespace) -> None:
    from ddtree import load_engine
    from ddtree.text import Tokenizer

    prompts, runs = rendered(args), []
    budgets = [int(budget) for budget in args.budgets.split(",")]
    engine = load_engine(
        args.model, args.drafter, device=args.device, dtype=args.dtype, max_context=2048, max_tree_budget=max(budgets)
    )
    eos = frozenset(Tokenizer.load(args.model).eos_token_ids)
    for budget in budgets:
        runs.append(run_ours(args, prompts, budget, engine, eos))
        report(args, runs)


def hf(args: argparse.Namespace) -> None:
    """Each answer against transformers' best tokens along it, and the margin where one is not its best."""
    import torch
    from transformers import AutoModelForCausalLM

    prompts = rendered(args)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    runs = []
    for path in (path for path in args.answers if path.exists()):
        answers, faults = json.loads(path.read_text())["runs"][0]["answers"], []
        for number, (prompt, found) in enumerate(zip(prompts, answers, strict=False)):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + found[:-1]], device=args.device)).logits[0, len(prompt) - 1 :]
            best = logits.argmax(-1).tolist()
            if best != found:
                at = _first_difference(found, best)
                faults.append({"answer": number, "at": at, "margin": float(logits[at, best[at]] - logits[at, found[at]])})
        runs.append({"answers_of": path.stem, "equal_answers": len(answers) - len(faults), "compared_answers": len(answers), "differences": faults})
        print(json.dumps(runs[-1]), flush=True)
        args.out.write_text(json.dumps({"runs": runs}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    asking, own, reading, rendering = (commands.add_parser(name) for name in ("ask", "ours", "hf", "render"))
    asking.add_argument("url")
    asking.add_argument("--concurrency", default="1,8")
    asking.add_argument("--budget", type=int)
    asking.add_argument("--top-p", type=float, default=1.0)
    asking.add_argument("--trace", type=Path)
    own.add_argument("--drafter", type=Path, required=True)
    own.add_argument("--budgets", default="16,64")
    own.add_argument("--device", default="auto")
    own.add_argument("--dtype", default="bfloat16")
    reading.add_argument("--answers", type=files_named, required=True)
    reading.add_argument("--device", default="cpu")
    for command, run in ((asking, ask), (own, ours), (reading, hf), (rendering, render)):
        command.set_defaults(run=run)
        command.add_argument("--model", type=Path, required=True)
        command.add_argument("--prompts", default="humaneval,gsm8k,mt-bench")
        command.add_argument("--rendered", type=Path)
        command.add_argument("--limit", type=int, default=20)
        command.add_argument("--max-tokens", type=int, default=64)
        command.add_argument("--temperature", type=float, default=0.0)
        command.add_argument("--seed", type=int)
        command.add_argument("--against", type=files_named, default=[])
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
