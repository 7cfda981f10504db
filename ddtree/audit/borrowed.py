"""An engine with another drafter, prefill chunk or number of places, for the time being; and several requests on it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace

from ddtree.engine.request import Request


@contextmanager
def drafting_with(engine, drafter):
    """The engine with another drafter; its own where `drafter` is None."""
    own, rounds = engine.drafter, engine.device_rounds
    if drafter is not None:
        # Rounds on the device draft with the drafter that they were captured with.
        engine.drafter, engine.device_rounds = drafter, None
    try:
        yield
    finally:
        engine.drafter, engine.device_rounds = own, rounds


@contextmanager
def limited(engine, **limits):
    """The engine with other limits of its `EngineConfig`, such as `prefill_chunk` or `max_running`."""
    own = engine.config
    engine.config = replace(own, **limits)
    try:
        yield
    finally:
        engine.config = own


def generate_together(engine, requests: Sequence[Request]) -> list[list[int]]:
    """Every request's token ids, all of them decoded in the same rounds. RuntimeError on a fault."""
    with limited(engine, max_running=len(requests)):
        answers = {engine.add(request): [] for request in requests}
        going = set(answers)
        while going:
            for emission in engine.step():
                if emission.error:
                    for request_id in going:
                        engine.abort(request_id)
                    raise RuntimeError(emission.error)
                answers[emission.request_id] += emission.token_ids
                going -= {emission.request_id} if emission.finish_reason else set()
    return list(answers.values())
