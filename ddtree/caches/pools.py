"""Pools: what all sequences of an engine remember, in buffers of fixed address that a CUDA graph can replay over.

Letters: S slots (sequences that may run), L layers of one kind, P pages, Hkv key/value heads, D head dim, Hk key heads,
Hv value heads, K key dim, V value dim, C conv channels, W conv width, R rows that one forward may stage.
The verb is the same as everywhere: rows are staged, `commit` makes a path permanent (`caches.base`), here for every
sequence of a round in one launch per kind of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddtree.kernels.causal_conv import causal_conv_commit_pooled
from ddtree.kernels.gated_delta import COMMITS, Walks, gated_delta_commit_pooled, gated_delta_walk_pooled
from ddtree.kernels.tree_attention import commit_pages

PAGE_SIZE = 64  # tokens a page holds
NULL_PAGE = 0  # never handed out: what padding writes goes there


class PageTable:
    """Which pages hold which slot's tokens, and how many of those are committed. Shared by target and drafter."""

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device | str) -> None:
        self.max_tokens = max_tokens  # of one slot, staged rows included
        max_pages = -(-max_tokens // PAGE_SIZE)
        self.pages = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device)
        self.context_lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._given = [0] * num_slots

    @property
    def num_slots(self) -> int:
        return self.pages.shape[0]

    def rows_given(self, slot: int) -> int:
        """Tokens, staged rows included, that the slot's pages hold."""
        return self._given[slot] * PAGE_SIZE

    def give(self, slot: int, pages: Sequence[int], first: int = 0) -> None:
        """The slot's tokens lie in `pages`; those before place `first` are known already. Waits for nothing on the device."""
        self._given[slot] = len(pages)
        if len(pages) > first:
            new = torch.tensor(pages[first:], dtype=torch.int32, pin_memory=self.pages.is_cuda)
            self.pages[slot, first : len(pages)].copy_(new, non_blocking=True)

    def take(self, slot: int) -> None:
        """Take the slot's pages away and forget its tokens."""
        self._given[slot] = 0
        self.pages[slot].fill_(NULL_PAGE)
        self.context_lengths[slot] = 0


class AttentionPool:
    """Keys and values of L attention layers, in pages."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_pages, PAGE_SIZE, num_kv_heads, head_dim)
        # Zeros, not garbage: keys beyond a sequence's end are masked, but a NaN among them would survive a product.
        self.key_pages = torch.zeros(shape, dtype=dtype, device=device)
        self.value_pages = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.key_pages.nbytes + self.value_pages.nbytes

    @property
    def page_bytes(self) -> int:
        """Of one page: a page's tokens, all layers."""
        return self.num_bytes // self.key_pages.shape[1]

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, row_slots: torch.Tensor, places: torch.Tensor, table: PageTable
    ) -> None:
        """Put `keys` and `values` [L, T, Hkv, D] at the `places` [T] of the slots `row_slots` [T], -1 for none."""
        pages = table.pages[row_slots.clamp(min=0).long(), (places // PAGE_SIZE).long()].long()
        flat = torch.where(row_slots >= 0, pages * PAGE_SIZE + places % PAGE_SIZE, NULL_PAGE)
        for pool, rows in ((self.key_pages, keys), (self.value_pages, values)):
            pool.flatten(1, 2).index_copy_(1, flat, rows)

    def commit(self, table: PageTable, slots: torch.Tensor, path: torch.Tensor, path_lengths: torch.Tensor) -> None:
        """Move each path's staged rows to the front, in order."""
        commit_pages(self.key_pages, self.value_pages, table.pages, slots, table.context_lengths, path, path_lengths)


@dataclass(frozen=True)
class RecurrentShape:
    """Of one Gated-DeltaNet layer; `input_width` is that of the projection whose first C columns are convolved."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    conv_channels: int
    input_width: int


class RecurrentPool:
    """Both states of L Gated-DeltaNet layers for S slots, and what committing the rows in flight will need."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        max_rows: int,
        shape: RecurrentShape,
        dtype: torch.dtype,
        device: torch.device | str,
        batch_invariant: bool = False,
    ) -> None:
        self.shape, self.batch_invariant = shape, batch_invariant
        heads, keys, values = shape.num_value_heads, shape.key_dim, shape.value_dim

        def zeros(*size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(num_layers, *size, dtype=kind, device=device)

        self.states = zeros(num_slots, heads, keys, values)
        self.conv_states = zeros(num_slots, shape.conv_width - 1, shape.conv_channels, kind=dtype)
        # Staged, per row: the projection's output; batch-invariant, what a walk reads of it; else normalised keys, solved
        # rows, log decays from the root.
        self.inputs = zeros(max_rows, shape.input_width, kind=dtype)
        if batch_invariant:
            self.convolved = zeros(max_rows, shape.conv_channels, kind=dtype)
            self.log_decay, self.beta = zeros(max_rows, heads), zeros(max_rows, heads)
            return
        self.keys = zeros(max_rows, shape.num_key_heads, keys)
        self.solved = zeros(max_rows, heads, values)
        self.log_decays = zeros(max_rows, heads, kind=torch.float64)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values() if isinstance(tensor, torch.Tensor))

    def commit(self, slots: torch.Tensor, starts: torch.Tensor, path: torch.Tensor, path_lengths: torch.Tensor) -> None:
        """Fold each path's staged rows into both states of its slot."""
        inputs = self.inputs[..., : self.shape.conv_channels]
        causal_conv_commit_pooled(inputs, self.conv_states, slots, starts, path, path_lengths)
        if self.batch_invariant:
            walks = Walks(COMMITS, slots, starts[:-1], path, path_lengths)
            gated_delta_walk_pooled(self.convolved, self.log_decay, self.beta, self.states, walks, self.shape)
            return
        gated_delta_commit_pooled(self.states, self.keys, self.solved, self.log_decays, slots, starts, path, path_lengths)

    @property
    def state_bytes(self) -> int:
        """Of one slot's two states."""
        return sum(states[:, 0].numel() * states.itemsize for states in (self.states, self.conv_states))

    def read(self, slot: int) -> torch.Tensor:
        """A copy of the slot's two states, [state_bytes] uint8."""
        parts = (states[:, slot].contiguous().view(-1).view(torch.uint8) for states in (self.states, self.conv_states))
        return torch.cat(tuple(parts))

    def write(self, slot: int, state: torch.Tensor) -> None:
        """Begin the slot with what `read` gave."""
        start = 0
        for states in (self.states, self.conv_states):
            one = states[:, slot]
            stop = start + one.numel() * one.itemsize
            one.copy_(state[start:stop].view(states.dtype).view(one.shape))
            start = stop

    def clear(self, slot: int) -> None:
        """The states before the first token."""
        self.states[:, slot].zero_()
        self.conv_states[:, slot].zero_()


class TargetPool:
    """Everything a target's layers remember of S sequences. Layer i is row `places[i]` of the pool of its kind."""

    def __init__(
        self,
        table: PageTable,
        attention: AttentionPool | None,
        recurrent: RecurrentPool | None,
        places: tuple[int, ...],
    ) -> None:
        self.table, self.attention, self.recurrent, self.places = table, attention, recurrent, places

    @property
    def num_bytes(self) -> int:
        return sum(pool.num_bytes for pool in (self.attention, self.recurrent) if pool is not None)

    def commit(self, slots: torch.Tensor, starts: torch.Tensor, path: torch.Tensor, path_lengths: torch.Tensor) -> None:
        """Make each sequence's `path` (local rows, [B, P] int32, of `path_lengths` [B]) permanent in every layer.

        The table's context lengths stay: target and drafter share them, so whoever commits both adds once.
        """
        if self.attention is not None:
            self.attention.commit(self.table, slots, path, path_lengths)
        if self.recurrent is not None:
            self.recurrent.commit(slots, starts, path, path_lengths)

    def clear(self, slot: int) -> None:
        """Forget the slot's sequence."""
        if self.recurrent is not None:
            self.recurrent.clear(slot)
