"""The static buffers of one round's draft trees: what the builder writes, and the rows of the target's forward.

Letters: B sequences, R packed rows, N most rows of one sequence, D most depths.
"""

from __future__ import annotations

import torch

MAX_BUDGET, MAX_DEPTHS = 1024, 31


class TreeBuffers:
    """Rows of B trees of at most `max_budget` drafted nodes. Allocated once; every round writes all of them anew.

    `starts` [B + 1] int32 is given, not written: sequence b owns rows starts[b] to starts[b + 1] - 1. It begins evenly
    spaced, 1 + max_budget rows a sequence; rows chosen otherwise (at least 1 + budget each) may be copied into it. The
    first `counts[b]` of a sequence's rows are its nodes. The others, and the rows from starts[B] on, are padding: token
    0, parent -1, depth 0, row slot -1, seeing nothing but themselves. Raises ValueError for sizes out of range.
    """

    def __init__(
        self,
        num_sequences: int,
        max_budget: int,
        device: torch.device | str,
        *,
        num_rows: int | None = None,
        max_depths: int = MAX_DEPTHS,
    ) -> None:
        if not 0 <= max_budget <= MAX_BUDGET:
            raise ValueError(f"max_budget must be 0 to {MAX_BUDGET}, got {max_budget}")
        if not 0 <= max_depths <= MAX_DEPTHS:
            raise ValueError(f"max_depths must be 0 to {MAX_DEPTHS}, got {max_depths}")
        if num_sequences < 1:
            raise ValueError(f"num_sequences must be >= 1, got {num_sequences}")
        self.max_budget, self.max_depths, self.device = max_budget, max_depths, torch.device(device)
        self.rows_each = 1 + max_budget
        rows = num_sequences * self.rows_each if num_rows is None else num_rows
        self.token_ids = self._zeros(rows, dtype=torch.int64)
        self.parents = self._zeros(rows)  # local index, -1 at the root
        self.depths = self._zeros(rows)
        self.scores = self._zeros(rows, dtype=torch.float32)  # log-probability from the root
        self.row_slots = self._zeros(rows)  # the sequence's pool slot, -1 for padding
        self.row_indices = self._zeros(rows)  # local index inside the sequence
        self.positions = self._zeros(rows)  # context length + depth
        self.ancestor_mask = self._zeros(rows, self.rows_each, dtype=torch.uint8)
        self.starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=self.device) * self.rows_each
        self.starts.clamp_(max=rows)
        self.counts = self._zeros(num_sequences)  # nodes of each tree, root included
        self.scratch: dict[str, torch.Tensor] = {}  # the kernel's own, by name

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def num_sequences(self) -> int:
        return len(self.counts)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)
