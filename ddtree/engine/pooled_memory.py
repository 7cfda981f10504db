"""The account of an engine over pools: the pages that its sequences hold are the pages of the account."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ddtree.caches.pools import PAGE_SIZE
from ddtree.caches.saved import CacheSize
from ddtree.engine.memory import Memory
from ddtree.engine.pooled_state import PooledState
from ddtree.engine.sequence import Sequence


class PooledMemory(Memory):
    """As `Memory`. A running sequence's states lie in its slot, which is there anyway, so only its rows take pages."""

    shares = True

    def __init__(self, state: PooledState) -> None:
        self.state, self.pages = state, state.allocator
        self.page_bytes, self.state_pages = state.store.page_bytes, 0
        self.size = CacheSize(self.page_bytes // PAGE_SIZE, state.state_bytes)
        self.rows_ahead = state.block_size

    def release(self, sequence: Sequence) -> None:
        """Take back all that the sequence holds, and what it was lent."""
        super().release(sequence)
        if sequence.loan is not None:
            sequence.loan.release()
            sequence.loan = None

    def reserve(self, sequence: Sequence) -> None:
        """Let the device know of pages that are new."""
        slot, table = sequence.target_state.slot, self.state.table
        known = table.rows_given(slot)
        if known != len(sequence.pages) * PAGE_SIZE:
            table.give(slot, sequence.pages, known // PAGE_SIZE)

    def num_pages_of(self, sequences: SequenceOf[Sequence]) -> int:
        """Pages that the sequences hold together; those that several share count once."""
        return len({page for sequence in sequences for page in sequence.pages})

    def _slack(self, sequence: Sequence) -> int:
        return 0  # a page more copies nothing
