"""PooledRows: what one forward over the pools processes, all of it in device memory of fixed address.

Letters: R packed rows (padding included), B sequences, N most rows of one sequence.
A CUDA graph replays over the same tensors, so nothing here is looked at by the host but the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from ddtree.kernels.gated_delta import Walks

# What the rows are decides what becomes permanent, and when.
TREE = "tree"  # nodes of draft trees: staged, until a path is committed
STEP = "step"  # one row a sequence, permanent at once: plain decoding
PREFILL = "prefill"  # consecutive prompt tokens, permanent at once


@dataclass(frozen=True, eq=False)
class PooledRows:
    """Sequence b owns the rows starts[b] ... starts[b + 1] - 1; rows from starts[B] on are padding."""

    mode: str
    token_ids: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int32; context length + depth
    starts: torch.Tensor  # [B + 1] int32
    slots: torch.Tensor  # [B] int32; the pool slot of each sequence
    row_slots: torch.Tensor  # [R] int32; -1 for padding
    row_indices: torch.Tensor  # [R] int32; place inside its sequence's rows
    parents: torch.Tensor | None  # [R] int32, -1 at the root; None: consecutive rows
    ancestor_mask: torch.Tensor | None  # [R, N] uint8; None: consecutive rows
    max_rows: int  # N
    lineage: torch.Tensor | None = None  # [R, A] int32, each row's last ancestors; of batch-invariant forwards
    walks: Walks | None = None  # how recurrent layers take the rows; of batch-invariant forwards

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.slots.shape[0]


def consecutive_rows(mode: str, token_ids: torch.Tensor, slots: torch.Tensor, context_lengths: torch.Tensor) -> PooledRows:
    """Rows without a tree: `token_ids` [B, n] int64 are n consecutive tokens of each of the sequences in `slots` [B].

    Made of device operations only, so that it may be part of a graph. `context_lengths` [S] int32 are the pool's.
    """
    num_sequences, count = token_ids.shape
    device = token_ids.device
    indices = torch.arange(count, device=device, dtype=torch.int32).repeat(num_sequences)
    row_slots = slots.repeat_interleave(count, output_size=num_sequences * count)
    return PooledRows(
        mode=mode,
        token_ids=token_ids.reshape(-1),
        positions=context_lengths[row_slots.long()] + indices,
        starts=torch.arange(0, num_sequences * count + 1, count, device=device, dtype=torch.int32),
        slots=slots,
        row_slots=row_slots,
        row_indices=indices,
        parents=None,
        ancestor_mask=None,
        max_rows=count,
    )


class PromptIndices(NamedTuple):
    """What `PREFILL` rows are, on the host."""

    token_ids: np.ndarray  # [R] int64
    places: np.ndarray  # [3, R] int32: positions, row slots, row indices
    starts: np.ndarray  # [B + 1] int32
    slots: np.ndarray  # [B] int32
    max_rows: int  # N

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]], firsts: Sequence[int], slots: Sequence[int]) -> PromptIndices:
        """The next prompt tokens of several sequences: `token_ids[b]` from place `firsts[b]` on, in slot `slots[b]`."""
        counts = [len(ids) for ids in token_ids]
        ids = np.fromiter(chain.from_iterable(token_ids), np.int64, sum(counts))
        indices = np.fromiter(chain.from_iterable(map(range, counts)), np.int32, len(ids))
        places = np.stack((np.repeat(np.array(firsts, np.int32), counts) + indices, np.repeat(np.array(slots, np.int32), counts), indices))
        return cls(ids, places.astype(np.int32), np.cumsum([0, *counts], dtype=np.int32), np.array(slots, np.int32), max(counts, default=0))

    def padded(self, num_rows: int, num_sequences: int, dummy: int) -> PromptIndices:
        """With rows of nobody behind them, and sequences without rows in slot `dummy`."""
        rows, sequences = num_rows - len(self.token_ids), num_sequences - len(self.slots)
        places = np.pad(self.places, ((0, 0), (0, rows)))
        places[1, len(self.token_ids) :] = -1
        starts = np.pad(self.starts, (0, sequences), mode="edge")
        slots = np.pad(self.slots, (0, sequences), constant_values=dummy)
        return PromptIndices(np.pad(self.token_ids, (0, rows)), places, starts, slots, num_rows)

    def copy_to(self, rows: PooledRows) -> None:
        """Make rows of the same shape these."""
        buffers = (rows.positions, rows.row_slots, rows.row_indices, rows.token_ids, rows.starts, rows.slots)
        for buffer, values in zip(buffers, (*self.places, self.token_ids, self.starts, self.slots), strict=True):
            buffer.copy_(torch.from_numpy(values), non_blocking=True)


def prompt_rows(indices: PromptIndices, device: torch.device) -> PooledRows:
    """`PREFILL` rows on the device."""
    # Memory of its own for each: rows of one tensor begin anywhere, and kernels would be compiled again for how they are aligned.
    positions, row_slots, row_indices, token_ids, starts, slots = (
        torch.tensor(each, device=device) for each in (*indices.places, indices.token_ids, indices.starts, indices.slots)
    )
    return PooledRows(
        mode=PREFILL,
        token_ids=token_ids,
        positions=positions,
        starts=starts,
        slots=slots,
        row_slots=row_slots,
        row_indices=row_indices,
        parents=None,
        ancestor_mask=None,
        max_rows=indices.max_rows,
    )
