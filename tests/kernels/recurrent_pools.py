"""Rounds of several sequences over a pool of recurrent states, as the pooled kernels' tests start from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.trees import ancestor_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("twin", "kernel")


def head_shape(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_key_heads=num_key_heads, num_value_heads=num_value_heads, key_dim=key_dim, value_dim=value_dim
    )


SMALL = head_shape(1, 2, 16, 32)
ODD = head_shape(2, 4, 12, 20)
LARGE = head_shape(16, 48, 128, 128)  # Qwen3.6-27B


def needs_triton(way: str) -> None:
    if way == "kernel":
        pytest.importorskip("triton")


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poison(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(size, torch.nan, dtype=dtype, device=DEVICE)


@dataclass(frozen=True)
class Layout:
    """Which rows belong to whom; sequences in slots of a pool that has two more, padding behind the last row."""

    trees: list[torch.Tensor | None]  # parents of each sequence's rows; None for no rows
    padding: int = 5

    @property
    def counts(self) -> list[int]:
        return [0 if tree is None else len(tree) for tree in self.trees]

    @property
    def num_rows(self) -> int:
        return sum(self.counts) + self.padding

    @property
    def num_slots(self) -> int:
        return len(self.trees) + 2

    @property
    def starts(self) -> torch.Tensor:
        return integers([0, *torch.tensor(self.counts).cumsum(0).tolist()])

    @property
    def slots(self) -> torch.Tensor:
        """Not in order, and not from 0 on."""
        return integers([len(self.trees) - index for index in range(len(self.trees))])

    @property
    def parents(self) -> torch.Tensor:
        rows = [tree for tree in self.trees if tree is not None]
        return torch.cat([*rows, torch.full((self.padding,), 10**6)]).to(torch.int32).to(DEVICE)

    @property
    def row_slots(self) -> torch.Tensor:
        slots = self.slots.tolist()
        rows = [slot for slot, count in zip(slots, self.counts, strict=True) for _ in range(count)]
        return integers(rows + [-1] * self.padding)

    @property
    def row_indices(self) -> torch.Tensor:
        return integers([index for count in self.counts for index in range(count)] + [0] * self.padding)

    @property
    def ancestor_mask(self) -> torch.Tensor:
        """[R, N] uint8; what it says of padding is anybody's guess."""
        mask = torch.full((self.num_rows, max(self.counts)), 1, dtype=torch.uint8)
        row = 0
        for tree in self.trees:
            if tree is not None:
                mask[row : row + len(tree), : len(tree)] = ancestor_mask(tree)
                row += len(tree)
        return mask.to(DEVICE)

    def sequences(self):
        """(index, slot, rows, parents) of those with rows."""
        bounds, slots = self.starts.tolist(), self.slots.tolist()
        for index, tree in enumerate(self.trees):
            if tree is not None:
                yield index, slots[index], slice(bounds[index], bounds[index + 1]), tree


@dataclass(frozen=True)
class Round:
    """Inputs of the gated delta rule for a layout; padding rows are NaN."""

    layout: Layout
    shape: SimpleNamespace
    mixed: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    states: torch.Tensor

    @classmethod
    def random(cls, layout: Layout, shape: SimpleNamespace, dtype: torch.dtype = torch.float32) -> Round:
        rows, heads = layout.num_rows, shape.num_value_heads
        width = 2 * shape.num_key_heads * shape.key_dim + heads * shape.value_dim
        # Some rows forget all, the rest little: sums must not lose the latter behind the former.
        strong = torch.rand(rows, heads) < 0.1
        log_decay = torch.where(strong, -20.0, -0.1 * torch.rand(rows, heads))
        given = [torch.randn(rows, width), log_decay, torch.rand(rows, heads)]
        for tensor in given:
            tensor[rows - layout.padding :] = torch.nan
        states = torch.randn(layout.num_slots, heads, shape.key_dim, shape.value_dim)
        mixed, log_decay, beta, states = (tensor.to(DEVICE) for tensor in (*given, states))
        return cls(layout, shape, mixed.to(dtype), log_decay, beta, states)

    def heads(self, rows: slice) -> tuple[torch.Tensor, ...]:
        """query, key, value, log_decay, beta of some rows, in fp64."""
        shape = self.shape
        keys = shape.num_key_heads * shape.key_dim
        query, key, value = self.mixed[rows].double().split((keys, keys, shape.num_value_heads * shape.value_dim), -1)
        by_key_head = (shape.num_key_heads, shape.key_dim)
        value = value.unflatten(-1, (shape.num_value_heads, shape.value_dim))
        gates = (self.log_decay[rows].double(), self.beta[rows].double())
        return query.unflatten(-1, by_key_head), key.unflatten(-1, by_key_head), value, *gates

    def changed(self, **changes) -> Round:
        return replace(self, **changes)

    def staged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Poisoned buffers: keys, solved, log_decays, with a few rows to spare."""
        rows, shape = self.layout.num_rows + 3, self.shape
        return (
            poison(rows, shape.num_key_heads, shape.key_dim),
            poison(rows, shape.num_value_heads, shape.value_dim),
            poison(rows, shape.num_value_heads, dtype=torch.float64),
        )

    def out(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return poison(self.layout.num_rows, self.shape.num_value_heads, self.shape.value_dim, dtype=dtype)
