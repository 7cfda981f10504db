"""What a round on the device left behind, read for all of its sequences at once.

B sequences, P path rows, N tree rows a sequence. A tree as arrays is made only for whoever looks at one: at 64 sequences the
host has some 15 microseconds for each of them before the device would wait for it.
"""

from __future__ import annotations

import numpy as np

from ddtree.tree.accept import Acceptance
from ddtree.tree.draft_tree import DraftTree


class RoundReport:
    """The tokens of each sequence as lists; its tree and its path when asked for."""

    def __init__(self, rows: np.ndarray, path_rows: int, has_trees: bool) -> None:
        """`rows` [B, `report_width`] int64: a length, emitted tokens, the path, then the tree if there is one."""
        self.rows, self.path_rows = rows, path_rows
        self.token_ids = [row[1 : 1 + row[0]] for row in rows[:, : 1 + path_rows].tolist()]
        self.num_drafted = (rows[:, 1 + 2 * path_rows] - 1).tolist() if has_trees else [0] * len(rows)


class Place:
    """A sequence's part of a report: its tree and its acceptance, made when they are asked for."""

    __slots__ = ("place", "report", "root_token")

    def __init__(self, report: RoundReport, place: int, root_token: int) -> None:
        self.report, self.place, self.root_token = report, place, root_token

    @property
    def tree(self) -> DraftTree:
        """As verified; the root alone in a plain round."""
        num_drafted = self.report.num_drafted[self.place]
        if not num_drafted:
            return DraftTree.root_only(self.root_token)
        arrays = self._arrays()[:, : 1 + num_drafted]
        parents, depths, scores = arrays[1:].astype(np.int32)
        return DraftTree(arrays[0], parents, depths, scores.view(np.float32))

    @property
    def scores(self) -> np.ndarray:
        """[N] float32, those of `tree` alone."""
        return self._arrays()[3, : 1 + self.report.num_drafted[self.place]].astype(np.int32).view(np.float32)

    @property
    def acceptance(self) -> Acceptance:
        """As verified."""
        row, paths, token_ids = self.report.rows[self.place], self.report.path_rows, self.report.token_ids[self.place]
        length = len(token_ids)
        return Acceptance(row[1 + paths : 1 + paths + length], token_ids[-1], row[1 : 1 + length])

    def _arrays(self) -> np.ndarray:
        return self.report.rows[self.place, 2 + 2 * self.report.path_rows :].reshape(4, -1)


def report_width(path_rows: int, rows_each: int) -> int:
    """int64 values that a sequence's report has."""
    return 1 + 2 * path_rows + (1 + 4 * rows_each if rows_each > 1 else 0)
