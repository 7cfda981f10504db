"""What a cache can be begun with again: rows of committed tokens, and the state after one of them.

Letters: n rows, D head dim. Rows may be cut anywhere; a state belongs to one token and cannot be cut back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheSize:
    """Bytes of device memory."""

    row_bytes: int  # of one token, committed or staged
    state_bytes: int  # of one sequence, whatever its context

    def __add__(self, other: CacheSize) -> CacheSize:
        return CacheSize(self.row_bytes + other.row_bytes, self.state_bytes + other.state_bytes)


@dataclass(frozen=True, eq=False)
class SavedRows:
    """Copies of the rows of consecutive tokens, per layer; [.., n, D] each."""

    num_rows: int
    layers: tuple[tuple[torch.Tensor, ...], ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def part(self, start: int, stop: int) -> SavedRows:
        """Some of them, in the same memory."""
        cut = tuple(tuple(tensor[..., start:stop, :] for tensor in layer) for layer in self.layers)
        return SavedRows(stop - start, cut)

    def copied(self) -> SavedRows:
        """Copies, so that what they were part of can be freed."""
        return SavedRows(self.num_rows, tuple(tuple(tensor.clone() for tensor in layer) for layer in self.layers))

    def release(self) -> None:
        """Nothing to do: memory of its own goes with its last reference."""


@dataclass(frozen=True, eq=False)
class SavedState:
    """Copies of the layers' states after one token; () for a layer that keeps rows instead."""

    layers: tuple[tuple[torch.Tensor, ...], ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def release(self) -> None:
        """Nothing to do, as for rows."""
