"""StagedRows: what committing a path needs of rows that the gated delta rule has processed."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class StagedRows:
    """Letters as in the package: N rows, Hk key heads, Hv value heads, K key dim, V value dim. No state per row:
    the committed state and these rebuild the state after any path.
    """

    keys: torch.Tensor  # [N, Hk, K] L2-normalised, in the state's dtype
    solved: torch.Tensor  # [N, Hv, V] u of each row (design.md §3), in the state's dtype
    log_decays: torch.Tensor  # [N, Hv] fp64: sum of g from the first row of the path to the row, inclusive

    @property
    def num_rows(self) -> int:
        return self.keys.shape[0]
