"""What earlier prompts left behind, for an engine over pools: pages that stay held when their sequence has gone.

Whole pages of a prefix are shared by all that begin with it, the last one in part is copied; a hybrid's states are copied
into pages of their own and back into a slot. Remembering rows costs no memory as long as whoever wrote them runs.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from ddtree.caches.pages import Holder, PageAllocator
from ddtree.caches.pools import PAGE_SIZE
from ddtree.caches.shared import SharedRows, SharedState
from ddtree.engine.pooled_memory import PooledMemory
from ddtree.engine.pooled_state import SlotState
from ddtree.engine.prefix_tree import LEAST_TOKENS, Found, PrefixTree
from ddtree.engine.sequence import Sequence


@dataclass(frozen=True, eq=False)
class Loan:
    """A prefix held for a sequence that will begin with it, so that it may be forgotten meanwhile."""

    allocator: PageAllocator
    length: int
    pages: tuple[int, ...]  # of its rows; the last maybe in part
    state: SharedState | None  # after its last token; None where rows say it all

    @property
    def whole_pages(self) -> tuple[int, ...]:
        """Those that its borrower may have as its own, for it will not write in them."""
        return self.pages[: self.length // PAGE_SIZE]

    def release(self) -> None:
        """Let go of it."""
        self.allocator.release(self.pages)
        if self.state is not None:
            self.state.release()


class PagedPrefixCache(PrefixTree):
    """Owned by the engine's thread. As `PrefixCache`: at most `limit_bytes`, and of the account what running sequences leave."""

    def __init__(self, limit_bytes: int, memory: PooledMemory) -> None:
        super().__init__(memory)
        self.state, self.store = memory.state, memory.state.store
        self.limit_bytes, self.limit_pages = limit_bytes, limit_bytes // memory.page_bytes
        self.holder = Holder(memory.pages)

    @property
    def num_bytes(self) -> int:
        """Of all pages that it holds, whoever else does."""
        return self.holder.num_pages * self.memory.page_bytes

    @property
    def num_pages(self) -> int:
        """Pages of the account that forgetting everything would free."""
        return self.holder.num_sole

    def remembers(self, sequence: Sequence) -> bool:
        """Whether the sequence's caches can be remembered and begun with."""
        slots = all(isinstance(s, SlotState) for s in (sequence.target_state, sequence.drafter_state) if s is not None)
        remembered = slots and sequence.request.cache_salt is not None
        assert remembered or sequence.loan is None, "what was lent at admission would be written over"
        return remembered

    def is_stateful(self, sequence: Sequence) -> bool:
        """Whether rows alone do not say what the target remembers: a hybrid."""
        return self.state.state_bytes > 0

    def lend(self, sequence: Sequence) -> None:
        """Before it is admitted: whole pages of the longest known prefix become its own first ones."""
        if sequence.request.cache_salt is None:
            return
        drafts = bool(sequence.stats.tree_budget)
        found = self._find(sequence.request.cache_salt, sequence.prefill_ids, drafts=drafts, stateful=self.state.state_bytes > 0)
        if found.length:
            sequence.loan = self._loan(found, drafts)
            self.memory.pages.retain(sequence.loan.whole_pages)
            sequence.pages = list(sequence.loan.whole_pages)

    def find(self, sequence: Sequence, token_ids: SequenceOf[int]) -> Found:
        """What is known of `token_ids` by now, or what was lent if that is no less; at least one token is left to compute."""
        stateful = self.is_stateful(sequence)
        found = self._find(sequence.request.cache_salt, token_ids, drafts=sequence.drafts, stateful=stateful)
        if sequence.loan is not None and sequence.loan.length >= found.length:
            return Found(sequence.loan.length, branch=found.branch)
        return found

    @torch.inference_mode()
    def restore(self, found: Found, sequence: Sequence) -> None:
        """Begin the sequence's slot with what was found."""
        loan = self._loan(found, sequence.drafts) if found.nodes else sequence.loan
        if sequence.loan is not None and sequence.loan is not loan:
            sequence.loan.release()
        sequence.loan = loan
        state, pages, whole = self.state, self.memory.pages, loan.whole_pages
        pages.retain(whole)
        pages.release(sequence.pages[: len(whole)])
        sequence.pages[: len(whole)] = whole
        if len(loan.pages) > len(whole):
            # It will write behind the last row, so that page has to be its own.
            self.store.copy(loan.pages[-1], sequence.pages[len(whole)])
        slot = sequence.target_state.slot
        if loan.state is not None:
            state.target.pool.recurrent.write(slot, loan.state.load())
        state.table.give(slot, sequence.pages)
        state.table.context_lengths[slot] = loan.length
        loan.release()
        sequence.loan = None

    @torch.inference_mode()
    def add(self, sequence: Sequence, token_ids: SequenceOf[int]) -> bool:
        """Remember what the sequence has committed, exactly `token_ids`; makes room by forgetting others. False where it
        cannot: too short, too large, or the device has gone on beyond the last of them."""
        tokens, salt = np.asarray(token_ids, np.int64), sequence.request.cache_salt
        stateful = self.is_stateful(sequence)
        if len(tokens) < LEAST_TOKENS or (stateful and not sequence.target_state.exact):
            return False
        if not self._make_room(sequence, tokens, salt, stateful):
            return False
        for node, start, stop in self._path(salt, tokens):
            rows = self._rows(sequence, start, stop)
            if sequence.drafts and node.drafter_rows is None:
                # These pages have both; those of who did not draft are needed no more.
                node.drafter_rows = rows.copied()
                if node.rows is not None:
                    node.rows.release()
                    node.rows = None
            if node.rows is None:
                node.rows = rows.copied()
        if stateful and node.state is None:
            node.state = self._keep_state(sequence)
        return True

    def _loan(self, found: Found, drafts: bool) -> Loan:
        pages, start = [], 0
        for node in found.nodes:
            rows = node.drafter_rows if drafts else node.rows
            part = rows.part(0, min(rows.num_rows, found.length - start))
            # Where two segments meet inside a page, the later one's page has the rows of both.
            pages[part.first_page :] = part.pages
            start += part.num_rows
        self.memory.pages.retain(pages)
        state = found.nodes[-1].state
        return Loan(self.memory.pages, found.length, tuple(pages), None if state is None else state.lent())

    def _rows(self, sequence: Sequence, start: int, stop: int) -> SharedRows:
        own = sequence.pages[start // PAGE_SIZE : -(-stop // PAGE_SIZE)]
        return SharedRows(self.holder, start, stop - start, tuple(own))

    def _keep_state(self, sequence: Sequence) -> SharedState:
        state = self.state.target.pool.recurrent.read(sequence.target_state.slot)
        pages = self.store.keep(state)
        self.holder.adopt(pages)
        return SharedState(self.store, self.holder, tuple(pages), len(state))

    def _make_room(self, sequence: Sequence, tokens: np.ndarray, salt: str, stateful: bool) -> bool:
        """Forget, but not of what lies along `tokens`, until what is new of it may be held. Never takes a page that a
        running sequence holds."""
        matched = self._match(salt, tokens)
        keep = [node for node, _ in matched]
        known = 0
        for node, count in matched:
            if sequence.drafts and node.drafter_rows is None:
                break
            known += count
        state_pages = self.store.pages_of(self.state.state_bytes) if stateful else 0
        own = sequence.pages[known // PAGE_SIZE : -(-len(tokens) // PAGE_SIZE)]
        new = state_pages + sum(not self.holder.holds(page) for page in own)
        free = self.memory.pages
        if new > self.limit_pages or state_pages > free.num_free + self.num_pages:
            return False
        while self.holder.num_pages + new > self.limit_pages or state_pages > free.num_free:
            if not self._forget_one(keep):
                return False
        return True
