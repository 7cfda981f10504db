"""One JSON line a request and round, where `SGLANG_DDTREE_TRACE` names a file: what was drafted and what was accepted."""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "SGLANG_DDTREE_TRACE"


class Trace:
    """Appends to a file, or does nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def from_environment(cls, rank: int) -> Trace:
        """Of the first tensor-parallel rank alone: the others know the same."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path and rank == 0 else None)

    def rounds(self, reqs, trees, acceptances) -> None:
        """A round of a batch."""
        if self.path is None:
            return
        lines = [
            json.dumps(
                {
                    "request": req.rid,
                    "num_drafted": tree.num_drafted,
                    "path": each.path.tolist(),
                    "acceptance_length": each.acceptance_length,
                    "first_children": bool(_first_children_only(tree, each.path)),
                }
            )
            for req, tree, each in zip(reqs, trees, acceptances, strict=True)
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


def _first_children_only(tree, path) -> bool:
    """Whether each node of the path is its parent's best child, so that a chain would have held it."""
    return all(tree.children(parent)[0] == node for parent, node in zip(path, path[1:], strict=False))
