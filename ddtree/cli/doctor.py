"""ddtree doctor: what works here, what does not, and what to do about it; exit status 0 only without a red line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from ddtree.cli.flags import add_model

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_model(parser, positional=True)
    parser.add_argument("--no-self-test", action="store_true", help="look at files and machine only; load nothing")


def doctor(args: argparse.Namespace) -> int:
    """Look at everything that can be looked at, a fault here and there notwithstanding."""
    from rich.console import Console

    checks = list(examine(args))
    show(checks, Console())
    counts = {status: sum(check.status == status for check in checks) for status in COLOURS}
    found = [vars(check) for check in checks]
    print(json.dumps({"passed": not counts["failed"], "model": args.model, "counts": counts, "checks": found}))
    return 1 if counts["failed"] else 0


def examine(args: argparse.Namespace) -> Iterator:
    """Every check, in the order of cause."""
    from ddtree.doctor.machine import machine_checks

    say("looking at the machine")
    yield from machine_checks(args.device, args.dtype)
    source, tokenizer, check = _find(args)
    yield check
    fits = False
    if source is not None:
        for each in _model_checks(args, source, tokenizer):
            fits = fits or (each.area, each.name, each.status) == ("memory", "weights", "ok")
            yield each
    if not args.no_self_test:
        yield from _self_test(args, source if fits else None, tokenizer)


def _find(args: argparse.Namespace):
    """The files and the tokenizer, with the line about them. An embedded model is not downloaded by the way."""
    from ddtree.cli.loaded import find
    from ddtree.doctor import FAILED, OK, SKIPPED, Check
    from ddtree.sources.embedded import EMBEDDED

    entry = EMBEDDED.get(args.model)
    if entry is not None and not shipped(args.model) and not entry.path.exists():
        return None, None, Check("files", args.model, SKIPPED, "not fetched yet", f"ddtree fetch {args.model}")
    try:
        source, tokenizer = find(args)
    except (ValueError, OSError) as error:
        return None, None, Check("files", args.model, FAILED, str(error), "the message says what is missing")
    drafter = f"drafter {source.drafter}" if source.drafter else f"no drafter: {source.drafter_reason}"
    return source, tokenizer, Check("files", args.model, OK, f"{source.target}; {drafter}")


def _model_checks(args: argparse.Namespace, source, tokenizer) -> Iterator:
    from ddtree.doctor import WARNING, Check
    from ddtree.doctor.compatibility import drafter_checks, read_drafter, read_target, target_checks
    from ddtree.doctor.fitting import memory_checks
    from ddtree.engine.loading import pick_device, pick_dtype

    refusal, target, shapes = read_target(source.target)
    if refusal is not None:
        yield refusal
        return
    yield from target_checks(target, tokenizer)
    drafter, drafter_shapes = None, {}
    if source.drafter is None:
        remedy = "every request is plain decoding: give the target's DFlash drafter (--drafter), or train one (ddtree train)"
        yield Check("compatibility", "drafter", WARNING, source.drafter_reason or "none", remedy)
    else:
        refusal, drafter, drafter_shapes = read_drafter(source.drafter)
        if refusal is not None:
            yield refusal
        else:
            yield from drafter_checks(drafter, target, tokenizer, source.drafter)
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    yield from memory_checks(device, dtype, target, shapes, drafter, drafter_shapes, args.max_context)


def _self_test(args: argparse.Namespace, source, tokenizer) -> Iterator:
    from ddtree.doctor import FAILED, Check
    from ddtree.doctor.selftest import hybrid_check
    from ddtree.engine.loading import pick_device, pick_dtype
    from ddtree.sources import resolve
    from ddtree.sources.embedded import EMBEDDED
    from ddtree.text import Tokenizer

    try:
        device = pick_device(args.device)
        dtype = pick_dtype(args.dtype, device)
    except ValueError:
        return  # said among the machine's lines
    say("self-test: a random hybrid pair")
    yield hybrid_check(device, dtype, say)
    if source is not None:
        yield _model_test(args, source, tokenizer)
    for name in EMBEDDED:
        # A pair that lies in the package costs nothing to try; one that would have to be fetched is left alone.
        if name != args.model and shipped(name):
            try:
                found = resolve(name)
                own = Tokenizer.load(found.target)
            except ValueError as error:
                yield Check("self-test", name, FAILED, str(error), "install ddtree again: what it ships is damaged")
                continue
            yield _model_test(args, found, own)


def _model_test(args: argparse.Namespace, source, tokenizer):
    """Load a pair and audit it."""
    from ddtree.cli.loaded import load
    from ddtree.doctor import FAILED, Check
    from ddtree.doctor.selftest import model_check

    say(f"self-test: {source.served_name}")
    try:
        engine = load(args, source)
    except (ValueError, OSError) as error:
        return Check("self-test", source.served_name, FAILED, str(error), "the message says what does not fit")
    return model_check(source.served_name, engine, tokenizer, say)


def shipped(name: str) -> bool:
    """Do the weights of an embedded model lie in the package itself?"""
    from ddtree.sources.embedded import EMBEDDED

    return (EMBEDDED[name].drafter_folder.parent / name / "config.json").is_file()


def show(checks, console) -> None:
    """The table, then each line that wants something done."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="ddtree doctor", title_justify="left")
    for name in ("area", "check", "", "found"):
        table.add_column(name, overflow="fold")
    for check in checks:
        colour = COLOURS[check.status]
        table.add_row(check.area, check.name, f"[{colour}]{check.status}[/{colour}]", escape(check.found))
    console.print(table)
    for check in (each for each in checks if each.remedy):
        colour = COLOURS[check.status]
        console.print(f"[{colour}]{check.status}[/{colour}] {escape(f'{check.area}, {check.name}: {check.remedy}')}", soft_wrap=True)


def say(line: str) -> None:
    """Progress, out of the way of the result."""
    print(f"doctor: {line}", file=sys.stderr, flush=True)
