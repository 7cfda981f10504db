"""ddtree bench: tokens per second, plain and with trees, or the reason why there is no number."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from ddtree.cli.flags import BATCH_INVARIANT, temperature, whole

DEFAULT_BUDGETS = "0,chain,4,8,16,32,64"
DEFAULT_PROMPTS = "humaneval,gsm8k,math500,mt-bench"
NAMED = ("chain", "auto")  # configurations that are no number of nodes
REFUSED = 1  # exit status
WIDTH = 140  # columns of the table


def add_bench(parser: argparse.ArgumentParser) -> None:
    """The flags of the command. Nothing heavy is imported for --help."""
    parser.add_argument(
        "model", nargs="?", default="smollm2", metavar="MODEL", help="as for serve (default: smollm2)"
    )
    parser.add_argument(
        "--drafter", help='the same forms; "none" for plain decoding (default: the model\'s own)'
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="(default: auto)"
    )
    parser.add_argument("--batch-invariant", action="store_true", help=BATCH_INVARIANT)
    parser.add_argument("--max-context", type=whole(2), metavar="N", help="(default: the model's own limit)")
    parser.add_argument(
        "--budgets",
        type=budgets,
        default=budgets(DEFAULT_BUDGETS),
        metavar="N,N,...",
        help=f'tree budgets; "chain" is one branch, "auto" chooses by cost; "16:factorised" leaves the adapter out; 0, plain decoding, is always in (default: {DEFAULT_BUDGETS})',
    )
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="timed passes (default: 3)")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write bench.png and bench.html there, or FILE.png and FILE.html")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON result there too")
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="measure nothing: compare two results of --out",
    )
    _add_requests(parser)
    _add_server(parser)
    parser.set_defaults(run=_run)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", metavar="SETS", help=f"names or JSONL files (default: {DEFAULT_PROMPTS})")
    parser.add_argument(
        "--dataset",
        action="append",
        default=[],
        metavar="ORG/NAME[:FILE]",
        help="a data set of the Hub, kept as JSONL once it was fetched; repeatable, alone or beside --prompts",
    )
    parser.add_argument(
        "--limit", type=whole(1), default=12, metavar="N", help="prompts, of all sets (default: 12)"
    )
    parser.add_argument("--max-tokens", type=whole(2), default=128, metavar="N", help="(default: 128)")
    parser.add_argument(
        "--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="for temperatures above 0 (default: 0)")
    parser.add_argument("--thinking", choices=("on", "off"), help="(default: the template's own)")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="force every reply to --max-tokens; labelled as such"
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="measure a running server instead; its API key is read from DDTREE_API_KEY"
    )
    parser.add_argument(
        "--concurrency", type=whole(1), metavar="N", help="with --url: requests at once (default: 1)"
    )
    parser.add_argument("--rate", type=positive, metavar="R", help="with --url: Poisson arrivals per second")


def budgets(text: str) -> tuple[str, ...]:
    """An argparse type: "0,chain,16,16:factorised" -> configurations, plain first, each once."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    return tuple(dict.fromkeys(["0", *map(_configuration, names)]))


def _configuration(name: str) -> str:
    from ddtree.bench.output import FACTORISED

    if name.endswith(FACTORISED):
        budget = name.removesuffix(FACTORISED)
        return (budget if budget in NAMED else str(whole(1)(budget))) + FACTORISED
    return name if name in NAMED else str(whole(0)(name))


def _is_chain(name: str) -> bool:
    return name.partition(":")[0] == "chain"


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ddtree.bench.report import show

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)  # a table broken to 80 columns cannot be read
    if args.compare:
        return _compare(args, console)
    if args.url and args.batch_invariant:
        raise ValueError("--batch-invariant is set where the server starts, not with --url: ddtree serve --batch-invariant")
    if not args.url and (args.concurrency or args.rate):
        raise ValueError(
            "--concurrency and --rate need --url: the engine in this process takes one request at a time"
        )
    result = _served(args) if args.url else _offline(args)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if args.plot and not result["refused"]:
        from ddtree.bench.plot import write_plots

        for path in write_plots(result, args.plot):
            say(f"wrote {path}")
    show(result, console)
    return REFUSED if result["refused"] else 0


def _compare(args: argparse.Namespace, console) -> int:
    from ddtree.bench.compare import compare, read_result, show_comparison

    before, after = (read_result(path) for path in args.compare)
    show_comparison(compare(before, after), tuple(path.name for path in args.compare), console)
    return 0


def _offline(args: argparse.Namespace) -> dict:
    from ddtree.bench.offline import Offline, Text
    from ddtree.bench.run import run_offline
    from ddtree.cli.loaded import find, load, start
    from ddtree.text import knows_thinking

    prompts = _prompts(args)
    source, tokenizer = find(args)
    engine = load(args, source)
    if any(name.startswith("auto") for name in args.budgets):
        start(source, engine, say)
    settings = _settings(args, chain=engine.has_drafter)
    switch = args.thinking or "as the template has it"
    thinking = switch if knows_thinking(tokenizer.chat_template) else "unknown to the template"
    facts = _facts(args, prompts, args.model, source.served_name, source.drafter, thinking)
    return run_offline(Offline(engine, Text(tokenizer, settings.thinking), settings), prompts, facts, say)


def _served(args: argparse.Namespace) -> dict:
    from ddtree.bench.run import run_served
    from ddtree.bench.serving import NO_CHAIN, Serving

    prompts = _prompts(args)
    if any(map(_is_chain, args.budgets)):
        say(f"chain is left out: {NO_CHAIN}")
    settings = _settings(args, chain=False)
    serving = Serving(args.url, settings, args.concurrency, args.rate, os.environ.get("DDTREE_API_KEY"))
    known = serving.facts()
    facts = _facts(
        args,
        prompts,
        known["model"],
        known["model"],
        known["drafter"],
        args.thinking or "as the server has it",
    )
    return run_served(serving, prompts, facts, say)


def _prompts(args: argparse.Namespace):
    """Of --prompts and --dataset; the package's sets where neither is given."""
    from ddtree.bench.dataset import dataset_prompts
    from ddtree.bench.workloads import load_prompts

    fetched = [str(dataset_prompts(name)) for name in args.dataset]
    named = args.prompts or ("" if fetched else DEFAULT_PROMPTS)
    return load_prompts(",".join(filter(None, [named, *fetched])), args.limit)


def _settings(args: argparse.Namespace, chain: bool):
    from ddtree.bench.offline import Settings
    from ddtree.sampling.params import SamplingParams

    return Settings(
        configs=tuple(name for name in args.budgets if chain or not _is_chain(name)),
        max_tokens=args.max_tokens,
        sampling=SamplingParams(temperature=args.temperature),
        seed=args.seed,
        ignore_eos=args.ignore_eos,
        thinking=None if args.thinking is None else args.thinking == "on",
        repeats=args.repeats,
    )


def _facts(args: argparse.Namespace, prompts, model: str, served_name: str, drafter, thinking: str):
    from ddtree.bench.run import Facts

    by_id = {prompt.id: prompt for prompt in prompts}

    def audit(config: str, item_id: str) -> str:
        prompt = by_id.get(item_id) or by_id[item_id.rpartition("#")[0]]
        return audit_command(args, model, prompt, config)

    # Where the drafter lies is the machine's affair; its folder's name is enough.
    return Facts(served_name, Path(drafter).name if drafter else None, thinking, command_line(), audit)


def audit_command(args: argparse.Namespace, model: str, prompt, config: str) -> str:
    """What would find the cause of a fault that `prompt` shows under one configuration."""
    named = [name.partition(":")[0] for name in (config, *args.budgets) if name not in ("0", "chain")]  # audit knows auto too
    parts = ["ddtree", "audit", model, "--budgets", ",".join(["0", *named[:1]])]
    parts += ["--max-tokens", str(args.max_tokens), "--prompts", prompt.file, "--limit", str(prompt.number)]
    if args.temperature:
        parts += ["--temperature", str(args.temperature), "--seed", str(args.seed)]
    for flag in ("drafter", "dtype", "device"):
        value = getattr(args, flag)
        parts += [f"--{flag}", value] if value not in (None, "auto") else []
    return shlex.join(parts)


def command_line() -> str:
    """As the user typed it, without the machine's own paths."""
    return shlex.join(["ddtree", *sys.argv[1:]])


def say(line: str) -> None:
    """Progress, out of the way of the result."""
    print(line, file=sys.stderr, flush=True)
