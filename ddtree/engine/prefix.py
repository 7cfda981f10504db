"""What earlier prompts left behind, for caches of one buffer each: copies of rows and states, so that they need not be
computed again.

Each node of the tree keeps copies of the rows of its own tokens, target's and drafter's, and, for a hybrid target, maybe the
state after the last of them (docs/batching.md says where). The least recently used leaves go first.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from ddtree.caches.model_cache import ModelCache
from ddtree.caches.saved import SavedRows, SavedState
from ddtree.engine.memory import Memory
from ddtree.engine.prefix_tree import LEAST_TOKENS, Found, Node, PrefixTree
from ddtree.engine.sequence import Sequence


class PrefixCache(PrefixTree):
    """Owned by the engine's thread. Holds at most `limit_bytes`, and of `memory` what running sequences leave free."""

    def __init__(self, limit_bytes: int, memory: Memory | None = None) -> None:
        super().__init__(memory)
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._pages: list[int] = []  # of the account

    @property
    def num_pages(self) -> int:
        """Pages of the account that forgetting everything would free."""
        return len(self._pages)

    def remembers(self, sequence: Sequence) -> bool:
        """Whether the sequence's caches can be remembered and begun with."""
        caches = (sequence.target_state, sequence.drafter_state)
        known = all(isinstance(cache, ModelCache) for cache in caches if cache is not None)
        return known and sequence.target_state is not None and sequence.request.cache_salt is not None

    def is_stateful(self, sequence: Sequence) -> bool:
        """Whether rows alone do not say what the target remembers: a hybrid."""
        return sequence.target_state.size.state_bytes > 0

    def lend(self, sequence: Sequence) -> None:
        """Before it is admitted: nothing, for what is known is copied once it has buffers."""

    def find(self, sequence: Sequence, token_ids: SequenceOf[int]) -> Found:
        """What is known of `token_ids`; at least one token is left to compute."""
        return self._find(sequence.request.cache_salt, token_ids, drafts=sequence.drafts, stateful=self.is_stateful(sequence))

    def restore(self, found: Found, sequence: Sequence) -> None:
        """Begin the sequence's empty caches with what was found."""
        left, rows, drafter_rows = found.length, [], []
        for node in found.nodes:
            count = min(left, len(node.token_ids))
            left -= count
            rows.append(node.rows.part(0, count))
            if sequence.drafts:
                drafter_rows.append(node.drafter_rows.part(0, count))
        state = found.nodes[-1].state if self.is_stateful(sequence) else no_state(sequence.target_state)
        sequence.target_state.restore(rows, state)
        if sequence.drafts:
            sequence.drafter_state.restore(drafter_rows, no_state(sequence.drafter_state))

    def add(self, sequence: Sequence, token_ids: SequenceOf[int]) -> bool:
        """Remember what the sequence has committed, exactly `token_ids`; makes room by forgetting others. False where it
        cannot: too short, or too large."""
        tokens, cache = np.asarray(token_ids, np.int64), sequence.target_state
        assert cache.context_length == len(tokens), f"{cache.context_length} tokens are committed, not {len(tokens)}"
        drafter = sequence.drafter_state if sequence.drafts else None
        if len(tokens) < LEAST_TOKENS or (drafter is not None and drafter.context_length != len(tokens)):
            return False
        size = cache.size if drafter is None else cache.size + drafter.size
        num_bytes = len(tokens) * size.row_bytes + size.state_bytes
        if not self._make_room(num_bytes, tokens, sequence.request.cache_salt, drafts=drafter is not None):
            return False
        try:
            for node, start, stop in self._path(sequence.request.cache_salt, tokens):
                if node.rows is None:
                    self.num_bytes += self._enrich(node, rows=cache.copy_rows(start, stop))
                if drafter is not None and node.drafter_rows is None:
                    self.num_bytes += self._enrich(node, drafter_rows=drafter.copy_rows(start, stop))
            if self.is_stateful(sequence) and node.state is None:
                self.num_bytes += self._enrich(node, state=cache.copy_state())
        finally:
            self._settle()  # also for what was copied before a copy failed
        return True

    def _make_room(self, num_bytes: int, tokens: np.ndarray, salt: str, *, drafts: bool) -> bool:
        """Forget, but not of what lies along `tokens`, until so many bytes more may be held. Never takes a page that a
        running sequence holds."""
        keep = [node for node, _ in self._match(salt, tokens)]
        # What is shared need not be copied again; a drafter's rows are shared only by who has some.
        shared = [part for node in keep[:-1] for part in (node.rows, node.drafter_rows if drafts else None) if part is not None]
        wanted = self.num_bytes + max(num_bytes - sum(part.num_bytes for part in shared), 0)
        if wanted - self.num_bytes > self.limit_bytes:
            return False
        while not self._allowed(wanted):
            before = self.num_bytes
            if not self._forget_one(keep):
                return False
            wanted -= before - self.num_bytes
        return True

    def _allowed(self, num_bytes: int) -> bool:
        if num_bytes > self.limit_bytes:
            return False
        return self.memory is None or -(-num_bytes // self.memory.page_bytes) <= len(self._pages) + self.memory.pages.num_free

    def _enrich(self, node: Node, **parts: SavedRows | SavedState | None) -> int:
        """Give the node what it lacks; returns the bytes added."""
        before = node.num_bytes
        for name, part in parts.items():
            setattr(node, name, part)
        return node.num_bytes - before

    def _settle(self) -> None:
        """Hold as many pages of the account as the bytes need."""
        if self.memory is None:
            return
        wanted = -(-self.num_bytes // self.memory.page_bytes)
        surplus = self._pages[wanted:]
        self._pages = self._pages[:wanted]
        self.memory.pages.release(surplus)
        self._pages += self.memory.pages.allocate(wanted - len(self._pages))

    def _release(self, node: Node) -> None:
        self.num_bytes -= node.num_bytes
        super()._release(node)
        self._settle()


def no_state(cache: ModelCache) -> SavedState:
    """The state of layers that keep rows."""
    return SavedState(tuple(() for _ in cache.layers))
