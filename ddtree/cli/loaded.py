"""From the model flags to a tokenizer, an engine and the default budget."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from ddtree.sources import Source, resolve
from ddtree.text import Tokenizer


@dataclass(frozen=True)
class Budget:
    """The tree budget of requests that ask for none, and why it is that."""

    size: int
    reason: str


def find(args: argparse.Namespace) -> tuple[Source, Tokenizer]:
    """Resolve the model (downloading what has to be) and read its tokenizer."""
    source = resolve(args.model, args.drafter)
    return source, Tokenizer.load(source.target)


def load(args: argparse.Namespace, source: Source):
    """The engine; torch is first imported here."""
    from ddtree.engine.loading import load_engine

    return load_engine(
        source.target, source.drafter, device=args.device, dtype=args.dtype, max_context=args.max_context
    )


def default_budget(args: argparse.Namespace, source: Source, engine, say: Callable[[str], None]) -> Budget:
    """--tree-budget, or what a measurement finds fastest on this machine."""
    maximum = engine.config.max_tree_budget
    if args.tree_budget is not None:
        if args.tree_budget > maximum:
            raise ValueError(f"--tree-budget must lie in 0 ... {maximum}, got {args.tree_budget}")
        if args.tree_budget and not engine.has_drafter:
            raise ValueError(
                f"--tree-budget {args.tree_budget} needs a drafter: {source.drafter_reason or 'none is loaded'}"
            )
        return Budget(args.tree_budget, "--tree-budget")
    if not engine.has_drafter:
        return Budget(0, source.drafter_reason or "no drafter is loaded")
    from ddtree.engine.calibrate import measure_budget

    say("measuring which tree budget is fastest here")
    choice = measure_budget(engine, source.drafter)
    return Budget(choice.budget, choice.reason)
