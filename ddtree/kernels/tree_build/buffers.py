"""The static buffers of one round's draft trees: what the builder writes, and the rows of the target's forward.

Letters: B sequences, R packed rows, N most rows of one sequence, D most depths.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

MAX_BUDGET, MAX_DEPTHS = 1024, 31
MAX_CANDIDATES = 64  # of conditioned scores: a row for each
NO_PARENT = 0x7FFF


class Scratch(NamedTuple):
    """The build kernels' memory, in the order of their arguments. Nodes of level d begin at d * block."""

    node_costs: torch.Tensor
    node_parents: torch.Tensor  # index in the level above
    node_ranks: torch.Tensor
    node_lexes: torch.Tensor  # place in the level by rank tuple
    kid_costs: torch.Tensor
    kid_keys: torch.Tensor
    kid_pairs: torch.Tensor
    alive_costs: torch.Tensor
    alive_nodes: torch.Tensor
    places: torch.Tensor
    new_indices: torch.Tensor
    lex_paths: torch.Tensor


class Pairs(NamedTuple):
    """What factorised scores need beside it."""

    table: torch.Tensor  # [PAIRS] int32, parent << 16 | rank
    bests: torch.Tensor  # the best costs of all levels so far


class Pool(NamedTuple):
    """What conditioned scores need beside it: the best costs of all levels so far, then a level's children."""

    costs: torch.Tensor
    pairs: torch.Tensor  # parent << 16 | candidate


def pair_table(max_budget: int) -> torch.Tensor:
    """[a power of two] int32 `parent << 16 | rank`: the pairs with (parent + 1)(rank + 1) <= max_budget, row by row.

    Child r of the i-th best parent is preceded by the children r' <= r of all parents i' <= i, so no other pair can
    be among the best. The rest of the table holds parents that no level has.
    """
    pairs = [
        parent << 16 | rank for parent in range(max_budget) for rank in range(max_budget // (parent + 1))
    ]
    table = torch.full((1 << max(len(pairs) - 1, 15).bit_length(),), NO_PARENT << 16, dtype=torch.int32)
    table[: len(pairs)] = torch.tensor(pairs, dtype=torch.int32)
    return table


class TreeBuffers:
    """Rows of B trees of at most `max_budget` drafted nodes. Allocated once; every round writes all of them anew.

    `starts` [B + 1] int32 is given, not written: sequence b owns rows starts[b] to starts[b + 1] - 1. It begins
    evenly spaced, 1 + max_budget rows a sequence; rows chosen otherwise (at least 1 + budget each) may be copied into
    it. The first `counts[b]` of a sequence's rows are its nodes. The others are padding: token 0, parent -1, depth 0,
    row slot -1, seeing themselves alone; so are the rows from starts[B] on, which see nothing.

    `num_candidates` is the most candidates per depth whose scores depend on the parent; 0: factorised scores alone.

    Raises ValueError for sizes out of range.
    """

    def __init__(
        self,
        num_sequences: int,
        max_budget: int,
        device: torch.device | str,
        *,
        num_rows: int | None = None,
        max_depths: int = MAX_DEPTHS,
        num_candidates: int = 0,
    ) -> None:
        if not 0 <= max_budget <= MAX_BUDGET:
            raise ValueError(f"max_budget must be 0 to {MAX_BUDGET}, got {max_budget}")
        if not 0 <= max_depths <= MAX_DEPTHS:
            raise ValueError(f"max_depths must be 0 to {MAX_DEPTHS}, got {max_depths}")
        if num_sequences < 1:
            raise ValueError(f"num_sequences must be >= 1, got {num_sequences}")
        if not 0 <= num_candidates <= MAX_CANDIDATES:
            raise ValueError(f"num_candidates must be 0 to {MAX_CANDIDATES}, got {num_candidates}")
        self.num_candidates = num_candidates
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
        if self.device.type == "cuda":
            # Now: a graph under capture could not make its table, and would own what it allocates.
            _ = self.scratch, self.pairs, self.pool

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def block(self) -> int:
        """Nodes that a level has room for, a power of two."""
        return 1 << max(self.max_budget - 1, 0).bit_length()

    @cached_property
    def pairs(self) -> Pairs:
        """The factorised kernel's own."""
        return Pairs(pair_table(self.max_budget).to(self.device), self._zeros(self.num_sequences, self.block, dtype=torch.int64))

    @cached_property
    def scratch(self) -> Scratch:
        """What a kernel keeps between its steps."""
        sequences, levels, num_kids = self.num_sequences, 1 + self.max_depths, len(self.pairs.table)
        nodes = (sequences, levels * self.block)
        return Scratch(
            node_costs=self._zeros(*nodes, dtype=torch.int64),
            node_parents=self._zeros(*nodes),
            node_ranks=self._zeros(*nodes),
            node_lexes=self._zeros(*nodes),
            kid_costs=self._zeros(sequences, num_kids, dtype=torch.int64),
            kid_keys=self._zeros(sequences, num_kids),
            kid_pairs=self._zeros(sequences, num_kids),
            alive_costs=self._zeros(*nodes, dtype=torch.int64),
            alive_nodes=self._zeros(*nodes),
            places=self._zeros(*nodes),
            new_indices=self._zeros(*nodes),
            lex_paths=self._zeros(*nodes, levels, dtype=torch.int16),
        )

    @cached_property
    def pool(self) -> Pool | None:
        """The conditioned kernel's own; None without `num_candidates`."""
        if self.num_candidates == 0:
            return None
        width = 1 << (self.num_candidates - 1).bit_length()
        room = (self.num_sequences, self.block * (1 + width))
        return Pool(self._zeros(*room, dtype=torch.int64), self._zeros(*room))

    @property
    def num_sequences(self) -> int:
        return len(self.counts)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)
