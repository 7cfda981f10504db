"""Who holds how much cache memory: running sequences and remembered prefixes, in pages of one account.

A page is `page_size` tokens of target and drafter together. What a hybrid's states take is counted in pages too, so that
one number says what fits. Buffers are as large as the pages held: `hold` first, then `ModelCache.reserve`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ddtree.caches.pages import OutOfPages, PageAllocator
from ddtree.caches.saved import CacheSize
from ddtree.engine.config import EngineConfig
from ddtree.engine.sequence import Sequence

PAGE_SIZE = 16  # tokens
# Room beyond what is needed now: growing a buffer copies it, so it should not grow by a page a round.
SLACK_SHARE, LEAST_SLACK = 8, 4  # an eighth of the pages held, and at least so many


class Memory:
    """The account. `size`: what a token and a sequence take, target and drafter added up."""

    rows_ahead = 0  # behind a round's staged rows, for one that is launched before this one's tokens are known
    shares = False  # whether a sequence's pages may be others' as well, so that it cannot be computed again in them

    def __init__(self, size: CacheSize, limit_bytes: int, page_size: int = PAGE_SIZE) -> None:
        """ValueError where the limit does not hold one sequence of one page."""
        self.size = size
        self.page_bytes = max(size.row_bytes, 1) * page_size
        self.state_pages = -(-size.state_bytes // self.page_bytes)
        num_pages = limit_bytes // self.page_bytes
        least = self.state_pages + 1
        if num_pages < least:
            raise ValueError(
                f"cache_bytes must be >= {least * self.page_bytes} (one sequence of {page_size} tokens), got {limit_bytes}"
            )
        self.pages = PageAllocator(num_pages, page_size)

    @property
    def num_bytes(self) -> int:
        """Held by all."""
        return (self.pages.num_pages - self.pages.num_free) * self.page_bytes

    @property
    def limit_bytes(self) -> int:
        return self.pages.num_pages * self.page_bytes

    @property
    def most_tokens(self) -> int:
        """Rows that a sequence alone could have."""
        return (self.pages.num_pages - self.state_pages) * self.pages.page_size

    def pages_of(self, num_rows: int) -> int:
        """Pages of a sequence with so many rows, its state included."""
        return self.state_pages + self.pages.pages_for(num_rows)

    def rows_held(self, sequence: Sequence) -> int:
        """Rows, committed and staged, that the sequence's pages hold."""
        return max(len(sequence.pages) - self.state_pages, 0) * self.pages.page_size

    def missing(self, sequence: Sequence, num_rows: int) -> int:
        """Pages that the sequence lacks for so many rows."""
        return max(self.pages_of(num_rows) - len(sequence.pages), 0)

    def hold(self, sequence: Sequence, num_rows: int) -> bool:
        """Give the sequence pages for `num_rows` rows, and some more where there are; False, and nothing, if not."""
        missing = self.missing(sequence, num_rows)
        if not missing:
            return True
        for count in (missing + self._slack(sequence), missing):
            try:
                sequence.pages += self.pages.allocate(count)
                return True
            except OutOfPages:
                continue
        return False

    def release(self, sequence: Sequence) -> None:
        """Take back all that the sequence holds."""
        self.pages.release(sequence.pages)
        sequence.pages = []

    def reserve(self, sequence: Sequence) -> None:
        """Buffers as large as the pages that the sequence holds."""
        for state in (sequence.target_state, sequence.drafter_state):
            if hasattr(state, "reserve"):
                state.reserve(self.rows_held(sequence))

    def num_pages_of(self, sequences: SequenceOf[Sequence]) -> int:
        """Pages that the sequences hold together."""
        return sum(len(sequence.pages) for sequence in sequences)

    def _slack(self, sequence: Sequence) -> int:
        return max(len(sequence.pages) // SLACK_SHARE, LEAST_SLACK) if sequence.pages else 0


def cache_size(target, drafter) -> CacheSize | None:
    """What a token and a sequence take, from empty caches; None for actors that do not say (a target may have `cache_size`)."""
    total = CacheSize(0, 0)
    for actor in (target, drafter):
        if actor is None:
            continue
        own = getattr(actor, "cache_size", None)
        if own is None:
            model = getattr(actor, "model", None)
            if model is None or not hasattr(model, "new_cache"):
                return None
            own = model.new_cache().size
        total = total + own
    return total


def memory_for(target, drafter, config: EngineConfig) -> Memory | None:
    """The account of `config.cache_bytes`; None without a limit. ValueError where one sequence of `max_context` does not fit."""
    if not config.cache_bytes:
        return None
    size = cache_size(target, drafter)
    if size is None:
        raise ValueError("cache_bytes needs a target that says what a token takes: leave it 0")
    memory = Memory(size, config.cache_bytes)
    if memory.most_tokens < config.max_context:
        raise ValueError(
            f"cache_bytes {config.cache_bytes} hold {memory.most_tokens} tokens of one sequence, max_context is "
            f"{config.max_context}: raise the one or lower the other"
        )
    return memory


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory did not suffice, the host's or a device's."""
    while error is not None:
        if isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False
