"""Flags that several commands share, and their checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable

BATCH_INVARIANT = "on a GPU, compute each token alike whatever runs beside it and however it is drafted: slower (default: off)"


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """An argparse type: an integer within limits."""
    limits = f">= {minimum}" if maximum is None else f"in {minimum} ... {maximum}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"must be an integer {limits}, got {text!r}")
        return value

    return parse


def tree_budget(text: str) -> int | str:
    """An argparse type: a budget, or "auto"."""
    return text if text == "auto" else whole(0)(text)


def temperature(text: str) -> float:
    """An argparse type: a temperature within OpenAI's limits."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"must be a number in 0 ... 2, got {text!r}")
    return value


def add_model(parser: argparse.ArgumentParser, positional: bool) -> None:
    """The model, its drafter, and where and how they run."""
    about = "a folder, a .gguf file, a Hub id, or an embedded name (default: smollm2)"
    if positional:
        parser.add_argument("model", nargs="?", default="smollm2", metavar="MODEL", help=about)
    else:
        parser.add_argument("--model", default="smollm2", help=about)
    parser.add_argument("--drafter", help='the same forms; "none" for plain decoding (default: the model\'s own)')
    parser.add_argument(
        "--adapter",
        default="auto",
        metavar="PATH",
        help='folder of an adapter, whose trees know their path; "none" for the drafter\'s own scores (default: the one beside it)',
    )
    parser.add_argument(
        "--tree-budget",
        type=tree_budget,
        default="auto",
        metavar="N",
        help="drafted nodes per round; auto chooses them each round by cost (default: auto)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="auto is bfloat16 on a GPU, else float32 (default: auto)",
    )
    parser.add_argument(
        "--no-cuda-graphs", action="store_true", help="on a GPU, launch every kernel by itself: slower, starts sooner, easier to debug"
    )
    parser.add_argument("--batch-invariant", action="store_true", help=BATCH_INVARIANT)
    parser.add_argument(
        "--max-context", type=whole(2), metavar="N", help="prompt and output in tokens (default: the model's own limit)"
    )


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How much to generate, and how tokens are chosen."""
    parser.add_argument("--max-tokens", type=whole(1), default=max_tokens, metavar="N", help=f"(default: {max_tokens})")
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument("--seed", type=int, help="for temperatures above 0 (default: drawn)")


def add_thinking(parser: argparse.ArgumentParser) -> None:
    """Whether the model thinks before it answers."""
    parser.add_argument("--thinking", choices=("on", "off"), help="where the model's template knows it (default: its own)")


def thinking(args: argparse.Namespace) -> bool | None:
    """The switch as templates read it; None leaves it to them."""
    return None if args.thinking is None else args.thinking == "on"
