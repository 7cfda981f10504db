"""From the model flags to a tokenizer, an engine and the default budget."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddtree.sources import Source, resolve
from ddtree.text import Tokenizer

LEAST_CONTEXT = 8  # tokens, below which no round can be timed
# For drafters without a card: what a barely trained one reaches (a three-minute trial), so that none is overrated.
ASSUMED_ACCEPTANCE = {"0": {"1": 1.4, "16": 2.24, "64": 2.56, "256": 2.84}}


@dataclass(frozen=True)
class Budget:
    """The tree budget of requests that ask for none, an integer or "auto", and why it is that."""

    size: int | str
    reason: str


def find(args: argparse.Namespace) -> tuple[Source, Tokenizer]:
    """Resolve the model (downloading what has to be) and read its tokenizer."""
    from ddtree.engine.loading import pick_device, pick_dtype
    from ddtree.models.gguf_file import GgufFile

    # What is known at once is said before anything is downloaded or read for seconds.
    pick_dtype(args.dtype, pick_device(args.device))
    _check_budget(getattr(args, "tree_budget", "auto"))
    source = resolve(args.model, args.drafter)
    for path in (source.target, source.drafter):
        if path is not None and path.suffix == ".gguf":
            GgufFile(path)  # cut off or no GGUF at all: the tokenizer would only say that it cannot be read
    _refuse_drafter(source.target)
    return source, Tokenizer.load(source.target)


def _check_budget(budget: int | str | None) -> None:
    from ddtree.engine.config import EngineConfig

    maximum = EngineConfig.max_tree_budget
    if isinstance(budget, int) and budget > maximum:
        raise ValueError(f"--tree-budget must lie in 0 ... {maximum}, got {budget}")


def _refuse_drafter(target: Path) -> None:
    """A drafter's folder given as MODEL is told so, not that its tokenizer or architecture is unknown."""
    config_json = (target if target.is_dir() else target.parent) / "config.json"
    named = json.loads(config_json.read_text(encoding="utf-8")).get("architectures") if config_json.is_file() else None
    if any("DFlash" in str(name) for name in named or ()):
        raise ValueError(f"{target}: this is a drafter; give its target as MODEL, and it as --drafter")


def load(args: argparse.Namespace, source: Source):
    """The engine; torch is first imported here."""
    from ddtree.engine.loading import load_engine

    try:
        return load_engine(
            source.target,
            source.drafter,
            device=args.device,
            dtype=args.dtype,
            max_context=args.max_context,
            cuda_graphs=not getattr(args, "no_cuda_graphs", False),
            adapter=getattr(args, "adapter", "auto"),
            batch_invariant=getattr(args, "batch_invariant", False),
            **batch_limits(args),
        )
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "out of memory" not in str(error).lower():
            raise
        raise ValueError(
            f"{source.target} does not fit into the memory of device {args.device}: try --dtype bfloat16, another "
            f"--device or a smaller model ({error})"
        ) from error


def batch_limits(args: argparse.Namespace) -> dict[str, object]:
    """What a server lets many requests have; the other commands answer one at a time and remember nothing."""
    if not hasattr(args, "max_running"):
        return {}
    sizes = {"cache_bytes": args.cache_memory, "prefix_bytes": args.prefix_memory}
    if args.cache_memory == 0:
        raise ValueError("--cache-memory must be > 0, got 0: leave it out for half of what is free")
    from ddtree.engine.config import EngineConfig

    return {
        "max_running": args.max_running,
        "max_rows": max(1 + EngineConfig.max_tree_budget, args.max_running),
        "max_stall_s": args.max_stall / 1000,
        "queue_timeout_s": float(args.queue_timeout),
        "request_timeout_s": float(args.request_timeout),
        **{name: None if gib is None else int(gib * 2**30) for name, gib in sizes.items()},
    }


def default_budget(
    args: argparse.Namespace, source: Source, engine, say: Callable[[str], None], limit_s: float = 8.0
) -> Budget:
    """--tree-budget; "auto", the default, has its costs measured in at most `limit_s`, and is 0 without a drafter."""
    if args.tree_budget != "auto":
        _check_budget(args.tree_budget)
        if args.tree_budget and not engine.has_drafter:
            raise ValueError(
                f"--tree-budget {args.tree_budget} needs a drafter: {source.drafter_reason or 'none is loaded'}"
            )
        return Budget(args.tree_budget, "--tree-budget")
    if not engine.has_drafter:
        return Budget(0, source.drafter_reason or "no drafter is loaded")
    start(source, engine, say, limit_s)
    if engine.auto is None:
        return Budget(0, f"a context of {engine.config.max_context} tokens is too short to draft in")
    return Budget("auto", "chosen each round by cost")


def start(source: Source, engine, say: Callable[[str], None], limit_s: float = 8.0) -> None:
    """Let the engine take requests of tree budget "auto", with costs from the cache or measured. Nothing without a drafter."""
    if not engine.has_drafter or engine.auto is not None or engine.config.max_context < LEAST_CONTEXT:
        return
    from ddtree.budget.store import CostStore
    from ddtree.engine.measure import start_auto
    from ddtree.sources.cache import cache_dir

    say("looking up, or measuring, what rounds cost here")
    names = {"model": str(source.target), "drafter": str(source.drafter)}
    store, card = CostStore(cache_dir() / "costs"), acceptance_of(source.drafter, engine)
    auto = start_auto(engine, card, store, names, limit_s, card_of(source.drafter))
    say(auto.describe())


def acceptance_of(drafter: Path, engine=None) -> dict[str, dict[str, float]]:
    """The card of the engine's adapter where it has one, else the drafter's, or what is assumed of one without."""
    conditioning = getattr(getattr(engine, "drafter", None), "conditioning", None)
    return getattr(conditioning, "acceptance", None) or card_of(drafter) or ASSUMED_ACCEPTANCE


def card_of(drafter: Path | None) -> dict[str, dict[str, float]] | None:
    """Mean acceptance lengths from `acceptance.json` beside the drafter: temperature -> budget -> length; None without."""
    card = None if drafter is None else (drafter if drafter.is_dir() else drafter.parent) / "acceptance.json"
    if card is None or not card.is_file():
        return None
    try:
        read = json.loads(card.read_text(encoding="utf-8"))
        return {str(t): {str(b): float(length) for b, length in row.items()} for t, row in read.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f'{card}: expected {{"temperature": {{"budget": acceptance length}}}}, found something else ({error})'
        ) from None
