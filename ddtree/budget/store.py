"""Measured costs on disk, one file per machine, model, drafter, dtype, device and number of threads.

A file that cannot be read, or is of something else, is a message and a new measurement, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from ddtree.budget.cost import CostModel

logger = logging.getLogger("ddtree")

VERSION = 1  # of the file and of what was measured how; others are measured anew


class CostStore:
    """Cost models under `folder`, by what they were measured of (`facts`: JSON values)."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def path(self, facts: Mapping[str, object]) -> Path:
        named = json.dumps(dict(facts), sort_keys=True)
        return self.folder / f"{hashlib.sha256(named.encode()).hexdigest()[:24]}.json"

    def load(self, facts: Mapping[str, object]) -> CostModel | None:
        """What was measured of this before; None, said in the log, where there is nothing of use."""
        path = self.path(facts)
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(read, dict) or read.get("version") != VERSION or read.get("facts") != dict(facts):
                raise ValueError("it is of another version or of something else")
            return CostModel.from_json(read["cost"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            logger.warning("ignoring the measured costs in %s: %s; measuring anew", path, error)
            return None

    def save(self, facts: Mapping[str, object], cost: CostModel) -> None:
        """Keep a measurement. A cache that cannot be written to only means measuring again."""
        path = self.path(facts)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"version": VERSION, "facts": dict(facts), "cost": cost.as_json()}
            part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(part, path)
