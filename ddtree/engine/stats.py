"""Stage times of decode rounds: draft, build, verify, accept, commit."""

from __future__ import annotations

import time
from contextlib import contextmanager

STAGES = ("draft", "build", "verify", "accept", "commit")


class StageClock:
    """Adds up wall time per stage.

    On a GPU a stage ends when its result reaches the host: candidates after draft, target tokens after verify.
    Commit is only queued, so its device time shows in the next draft.
    """

    def __init__(self):
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def __call__(self, stage: str):
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start
