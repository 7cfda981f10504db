"""ddtree trace: a saved trace as a page to step through."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_trace(parser: argparse.ArgumentParser) -> None:
    """The flags of `ddtree trace`."""
    parser.add_argument("trace", type=Path, metavar="FILE", help="one round a line, or a stream saved with ddtree_trace: true")
    parser.add_argument("--output", type=Path, metavar="HTML", help="(default: FILE with .html for its ending)")


def trace(args: argparse.Namespace) -> int:
    """Write the page, say where. ValueError for what is no trace."""
    from ddtree.server.replay import replay_page
    from ddtree.server.saved_trace import read_rounds

    output = args.output or args.trace.with_suffix(".html")
    if output.resolve() == args.trace.resolve():
        raise ValueError(f"--output {output} is the trace itself: name another file")
    try:
        with args.trace.open(encoding="utf-8-sig") as lines:
            groups = read_rounds(lines)
    except ValueError as error:
        raise ValueError(f"{args.trace}: {error}") from None
    output.write_text(replay_page(groups, f"Trace of {args.trace.name}"), encoding="utf-8")
    print(output)
    return 0
