"""One JSON line a request and round, where `SGLANG_DDTREE_TRACE` names a file: what was drafted and accepted, and stage times.

Stage times are the host's, so a stage includes whatever of the device it waits for; with `SGLANG_DDTREE_TRACE_SYNC=1` it waits
for all of its own work, which makes rounds slower and says where the device's time goes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

VARIABLE, SYNC_VARIABLE = "SGLANG_DDTREE_TRACE", "SGLANG_DDTREE_TRACE_SYNC"


class Trace:
    """Appends to a file, or does nothing."""

    def __init__(self, path: Path | None, synced: bool = False) -> None:
        self.path, self.synced = path, synced and torch.cuda.is_available()
        self.stage_ms: dict[str, float] = {}
        self.num_rounds = 0
        self._began = self._ended = time.perf_counter()
        self._between_ms = 0.0
        self._prefill_ms: dict[str, float] = {}

    @classmethod
    def from_environment(cls, rank: int) -> Trace:
        """Of the first tensor-parallel rank alone: the others know the same."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path and rank == 0 else None, os.environ.get(SYNC_VARIABLE) == "1")

    def begin(self) -> None:
        """A round begins; what lies between it and the last one is SGLang's."""
        self._began = time.perf_counter()
        self._between_ms = (self._began - self._ended) * 1000
        self.stage_ms = {}

    @contextmanager
    def stage(self, name: str):
        """A stage of the round."""
        started = time.perf_counter()
        yield
        if self.path is None:
            return
        if self.synced:
            torch.cuda.synchronize()
        self.stage_ms[name] = round((time.perf_counter() - started) * 1000, 3)

    @contextmanager
    def prefill(self, part: str):
        """A part of a prefill; its time goes with the next round's, in which prompts were waited for."""
        started = time.perf_counter()
        yield
        spent = (time.perf_counter() - started) * 1000
        self._prefill_ms[part] = round(self._prefill_ms.get(part, 0.0) + spent, 3)

    def end(self, reqs, parents: Callable[[], Sequence[np.ndarray]], paths: Sequence[np.ndarray]) -> None:
        """The round of a batch: of each request its tree's `parents()` [N] and the accepted path. Times of the whole batch are in
        each line; `between_ms` is what passed since the round before, `prefill_ms` of our prefills in it."""
        ended = time.perf_counter()
        self.num_rounds += 1
        whole = {
            "round": self.num_rounds,
            "round_ms": round((ended - self._began) * 1000, 3),
            "between_ms": round(self._between_ms, 3),
            "stage_ms": self.stage_ms,
            "prefill_ms": self._prefill_ms,
        }
        self._prefill_ms = {}
        lines = [
            json.dumps(
                {
                    "request": req.rid,
                    "num_drafted": len(tree) - 1,
                    "path": path.tolist(),
                    "acceptance_length": len(path),
                    "first_children": _first_children_only(tree, path),
                    **whole,
                }
            )
            for req, tree, path in zip(reqs, parents(), paths, strict=True)
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        self._ended = time.perf_counter()


def _first_children_only(parents: np.ndarray, path: np.ndarray) -> bool:
    """Whether each node of the path is its parent's best child, so that a chain would have held it."""
    pairs = zip(path, path[1:], strict=False)
    return all(np.flatnonzero(parents == parent)[0] == node for parent, node in pairs)
