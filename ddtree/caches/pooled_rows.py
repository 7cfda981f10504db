"""PooledRows: what one forward over the pools processes, all of it in device memory of fixed address.

Letters: R packed rows (padding included), B sequences, N most rows of one sequence.
A CUDA graph replays over the same tensors, so nothing here is looked at by the host but the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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


def prompt_rows(
    token_ids: Sequence[Sequence[int]], firsts: Sequence[int], slots: Sequence[int], device: torch.device
) -> tuple[PooledRows, list[int]]:
    """`PREFILL` rows of several sequences, of each the next tokens of its prompt: `token_ids` from place `firsts[b]` on, in slot
    `slots[b]`. Returns with them where each sequence's rows begin, and the last one's end."""
    counts = [len(ids) for ids in token_ids]
    starts = list(accumulate(counts, initial=0))
    indices = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    each = np.stack((np.repeat(firsts, counts) + indices, np.repeat(slots, counts), indices)).astype(np.int32)
    positions, row_slots, row_indices = torch.from_numpy(each).to(device)
    rows = PooledRows(
        mode=PREFILL,
        token_ids=torch.from_numpy(np.concatenate([np.asarray(ids, np.int64) for ids in token_ids])).to(device),
        positions=positions,
        starts=torch.tensor(starts, dtype=torch.int32).to(device),
        slots=torch.tensor(slots, dtype=torch.int32).to(device),
        row_slots=row_slots,
        row_indices=row_indices,
        parents=None,
        ancestor_mask=None,
        max_rows=max(counts),
    )
    return rows, starts
