"""Random traffic for an engine: requests that join at random times, cancels and faults among them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ddtree.engine.engine import Engine
from ddtree.engine.request import Request


class SpoiltWatcher:
    """Raises when its request has emitted `at` tokens: a fault in one request's own part."""

    def __init__(self, at: int):
        self.left = at

    def feed(self, token_id: int) -> str | None:
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("a spoilt watcher")
        return None


@dataclass
class Course:
    """What became of one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    stats: object = None
    cancelled: bool = False

    def take(self, emission) -> None:
        assert self.finish_reason is None and not self.cancelled, "nothing is emitted after the end"
        self.token_ids.extend(emission.token_ids)
        self.finish_reason, self.error, self.stats = emission.finish_reason, emission.error, emission.stats


def run_schedule(engine: Engine, requests: list[Request], rng, cancel_share: float = 0.0, join_share: float = 0.3) -> list[Course]:
    """Let the requests join between steps at random times, cancel some midway; every course, in the requests' order."""
    courses, live, left = [], {}, list(requests)
    while left or engine.has_work:
        while left and (not engine.has_work or rng.random() < join_share):
            course = Course(left.pop(0))
            courses.append(course)
            live[engine.add(course.request)] = course
        for emission in engine.step():
            live[emission.request_id].take(emission)
        if live and rng.random() < cancel_share:
            request_id = int(rng.choice(list(live)))
            if live[request_id].finish_reason is None:
                engine.abort(request_id)
                live[request_id].cancelled = True
    return courses


def check_courses(courses: list[Course], expected) -> None:
    """Every request that ended well equals `expected(request)`; what was cut short is the beginning of it."""
    for course in courses:
        solo = expected(course.request)
        if course.finish_reason in ("stop", "length"):
            assert course.token_ids == solo, course.request
            assert course.stats.output_tokens == len(solo)
        else:
            assert course.cancelled or course.finish_reason == "error"
            assert course.token_ids == solo[: len(course.token_ids)]


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
