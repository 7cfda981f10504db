"""What pages of the pools hold beyond one sequence: rows that several share, and states that a hybrid begins with again.

A page holds the same places of all attention layers, target's and drafter's. Committed rows never change, so a page may have
several holders; who writes behind them needs a page of its own, once the last page is in part another's. A state is
bytes to a page: both kinds of memory are one account. Letters: L layers, P pages, W words of 8 bytes, n pages of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ddtree.caches.pages import Holder, PageAllocator
from ddtree.caches.pools import PAGE_SIZE, AttentionPool


class PageStore:
    """The pages of all pools, by number."""

    def __init__(self, pools: Sequence[AttentionPool], allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.page_bytes = sum(pool.page_bytes for pool in pools)
        pages = [pages for pool in pools for pages in (pool.key_pages, pool.value_pages)]
        self._words = [each.view(torch.int64).flatten(2) for each in pages]  # [L, P, W] each
        self._device = pages[0].device

    def pages_of(self, num_bytes: int) -> int:
        """Pages that hold so many bytes."""
        return -(-num_bytes // self.page_bytes)

    def copy(self, source: int, destination: int) -> None:
        """All rows of one page into another."""
        for words in self._words:
            words[:, destination].copy_(words[:, source])

    def keep(self, data: torch.Tensor) -> list[int]:
        """Put `data` [num_bytes] uint8 into new pages, of one holder each. OutOfPages, and nothing done, where too few are free."""
        pages = self.allocator.allocate(self.pages_of(len(data)))
        packed = torch.zeros(len(pages) * self.page_bytes, dtype=torch.uint8, device=self._device)
        packed[: len(data)] = data
        index, start = self._index(pages), 0
        packed = packed.view(torch.int64).view(len(pages), -1)
        for words in self._words:
            layers, _, width = words.shape
            part = packed[:, start : start + layers * width].unflatten(1, (layers, width))
            words.index_copy_(1, index, part.transpose(0, 1))
            start += layers * width
        return pages

    def load(self, pages: Sequence[int], num_bytes: int) -> torch.Tensor:
        """What `keep` was given, [num_bytes] uint8."""
        index = self._index(pages)
        parts = [words.index_select(1, index).transpose(0, 1).flatten(1) for words in self._words]
        return torch.cat(parts, dim=1).view(torch.uint8).view(-1)[:num_bytes]

    def wipe(self, pages: Sequence[int]) -> None:
        """Zeros, once a state has left its pages: rows may come to lie in them, and beyond rows there must be no NaN."""
        index = self._index(pages)
        for words in self._words:
            words.index_fill_(1, index, 0)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(pages, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return index.to(self._device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Rows of consecutive tokens, in pages. As `SavedRows`, but parts of one whole may share a page."""

    holder: Holder | PageAllocator
    first: int  # place of the first token in its sequence
    num_rows: int
    pages: tuple[int, ...]  # of the places from `first` rounded down to a page

    @property
    def first_page(self) -> int:
        """Which of its sequence's pages its first one is."""
        return self.first // PAGE_SIZE

    def part(self, start: int, stop: int) -> SharedRows:
        """Some of them, in the same pages and not held for themselves."""
        first = self.first + start
        own = slice(first // PAGE_SIZE - self.first_page, -(-(self.first + stop) // PAGE_SIZE) - self.first_page)
        return SharedRows(self.holder, first, stop - start, self.pages[own])

    def copied(self) -> SharedRows:
        """The same rows, held once more."""
        self.holder.retain(self.pages)
        return self

    def release(self) -> None:
        """Let go of the pages."""
        self.holder.release(self.pages)


@dataclass(frozen=True, eq=False)
class SharedState:
    """The states of a hybrid's layers after one token, as bytes in pages."""

    store: PageStore
    holder: Holder | PageAllocator
    pages: tuple[int, ...]
    num_bytes: int

    def lent(self) -> SharedState:
        """The same state, held by whoever borrows it."""
        self.store.allocator.retain(self.pages)
        return replace(self, holder=self.store.allocator)

    def load(self) -> torch.Tensor:
        """[num_bytes] uint8, as `RecurrentPool.read` gave it."""
        return self.store.load(self.pages, self.num_bytes)

    def release(self) -> None:
        """Let go of the pages."""
        self.holder.release(self.pages)
        free = [page for page in self.pages if not self.store.allocator.holders[page]]
        if free:
            self.store.wipe(free)
