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

    def seen(self, place: int, root_token: int) -> tuple[DraftTree, Acceptance]:
        """A sequence's tree, the root alone in a plain round, and its acceptance as verified."""
        row, paths = self.rows[place], self.path_rows
        length = len(self.token_ids[place])
        emitted, path = row[1 : 1 + length], row[1 + paths : 1 + paths + length]
        acceptance = Acceptance(path, self.token_ids[place][-1], emitted)
        if not self.num_drafted[place]:
            return DraftTree.root_only(root_token), acceptance
        arrays = row[2 + 2 * paths :].reshape(4, -1)[:, : 1 + self.num_drafted[place]]
        parents, depths, scores = arrays[1:].astype(np.int32)
        return DraftTree(arrays[0], parents, depths, scores.view(np.float32)), acceptance


def report_width(path_rows: int, rows_each: int) -> int:
    """int64 values that a sequence's report has."""
    return 1 + 2 * path_rows + (1 + 4 * rows_each if rows_each > 1 else 0)
