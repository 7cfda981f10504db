"""Pages: who holds which fixed-size pieces of a cache. A page may have several holders; the last one to let go frees it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class OutOfPages(MemoryError):
    """More pages were asked for than are free."""


class PageAllocator:
    """Hands out `num_pages` page numbers from `first_page` on, lowest first at the start; holds no memory itself.

    Its own size is fixed: whatever comes and goes, it keeps one count per page and one list of free numbers.
    """

    def __init__(self, num_pages: int, page_size: int, first_page: int = 0) -> None:
        """`page_size`: tokens a page holds. ValueError unless both are positive."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be >= 1, got {num_pages} and {page_size}")
        self.num_pages, self.page_size, self.first_page = num_pages, page_size, first_page
        self._free = list(range(first_page, first_page + num_pages))[::-1]
        self.holders = np.zeros(first_page + num_pages, dtype=np.int64)  # of each page

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one holder each. OutOfPages, and nothing taken, where fewer are free."""
        if count < 0:
            raise ValueError(f"count must be >= 0, got {count}")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages of {self.page_size} tokens wanted, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder for each. ValueError, and nothing retained, for a page that nobody holds."""
        pages = self._held(pages)
        for page in pages:
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each; a page without holders is free at once. ValueError for a page that nobody holds."""
        for page in self._held(pages):
            # Twice in one call is as wrong as twice in two.
            if not self.holders[page]:
                raise ValueError(f"page {page} was released more often than it was held")
            self.holders[page] -= 1
            if not self.holders[page]:
                self._free.append(page)

    def _held(self, pages: Iterable[int]) -> list[int]:
        pages = list(pages)
        for page in pages:
            if not 0 <= page < len(self.holders) or not self.holders[page]:
                raise ValueError(f"page {page} is not held by anyone: it was never allocated, or was released already")
        return pages


class Holder:
    """One of those who hold pages of an allocator: how often it holds which, and what its leaving would free."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self._counts = np.zeros_like(allocator.holders)
        self.num_pages = 0  # held at least once

    @property
    def num_sole(self) -> int:
        """Pages that nobody else holds."""
        return int(((self._counts > 0) & (self._counts == self.allocator.holders)).sum())

    def holds(self, page: int) -> bool:
        """Whether it holds the page."""
        return self._counts[page] > 0

    def retain(self, pages: Iterable[int]) -> None:
        """As `PageAllocator.retain`."""
        pages = list(pages)
        self.allocator.retain(pages)
        self.adopt(pages)

    def adopt(self, pages: Iterable[int]) -> None:
        """Be the holder that `allocate` gave the pages."""
        for page in pages:
            self.num_pages += self._counts[page] == 0
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """As `PageAllocator.release`. ValueError for a page that it does not hold."""
        pages = list(pages)
        for page in pages:
            if not self._counts[page]:
                raise ValueError(f"page {page} is not held by this holder")
            self._counts[page] -= 1
            self.num_pages -= self._counts[page] == 0
        self.allocator.release(pages)
