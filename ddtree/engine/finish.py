"""The one rule that ends a generation: scan the emitted tokens in order, stop at the first reason (design.md §6)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ddtree.engine.request import Request


@dataclass(frozen=True)
class Finish:
    """Where and why it ended: `num_kept` of the scanned tokens belong to the output."""

    num_kept: int
    finish_reason: str  # stop | length
    stop_reason: int | str | None = None


def scan(emitted: SequenceOf[int], request: Request, num_before: int) -> Finish | None:
    """Read newly emitted tokens, `num_before` of which came earlier; None if the generation goes on.

    A stop inside the budget wins over the cap, a cap before the stop is `length`. The stop token itself is kept:
    it counts in usage, the text leaves it out.
    """
    ends, stops = request.eos_token_ids, request.stop_token_ids
    within = request.watcher is None and num_before + len(emitted) < request.max_tokens
    if within and ends.isdisjoint(emitted) and stops.isdisjoint(emitted):
        return None
    for count, token_id in enumerate(emitted, start=1):
        token_id = int(token_id)
        if token_id in ends or token_id in stops:
            return Finish(count, "stop", token_id)
        if request.watcher is not None:
            stop_string = request.watcher.feed(token_id)
            if stop_string is not None:
                return Finish(count, "stop", stop_string)
        if num_before + count >= request.max_tokens:
            return Finish(count, "length")
    return None
