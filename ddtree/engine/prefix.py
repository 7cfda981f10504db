"""What earlier prompts left behind: rows and states of shared prefixes, so that they need not be computed again.

A tree of segments: a path from a root spells a prefix, each node keeps the rows of its own tokens, target's and drafter's,
and, for a hybrid target, maybe the state after the last of them. Rows can be cut anywhere, so an attention-only target hits
at any length; a hybrid hits only where a state was kept (docs/batching.md says where). The least recently used leaves go first.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from ddtree.caches.model_cache import ModelCache
from ddtree.caches.saved import SavedRows, SavedState
from ddtree.engine.memory import Memory
from ddtree.engine.sequence import Sequence

LEAST_TOKENS = 16  # a shorter prefix is computed sooner than looked after


@dataclass(eq=False)
class Node:
    """One segment. A root has no tokens."""

    token_ids: np.ndarray  # [n] int64
    parent: Node | None = None
    rows: SavedRows | None = None
    drafter_rows: SavedRows | None = None  # None where nobody drafted
    state: SavedState | None = None  # after the last token; None where none was kept, or the target needs none
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    last_used: int = 0

    @property
    def row_bytes(self) -> int:
        return sum(part.num_bytes for part in (self.rows, self.drafter_rows) if part is not None)

    @property
    def num_bytes(self) -> int:
        return self.row_bytes + (self.state.num_bytes if self.state is not None else 0)


@dataclass(frozen=True, eq=False)
class Found:
    """The longest usable prefix of a prompt."""

    length: int = 0
    nodes: tuple[Node, ...] = ()  # the last may be used in part
    branch: int = 0  # tokens shared with what is remembered, usable or not: here a state would have served


class PrefixCache:
    """Owned by the engine's thread. Holds at most `limit_bytes`, and of `memory` what running sequences leave free."""

    def __init__(self, limit_bytes: int, memory: Memory | None = None) -> None:
        self.limit_bytes, self.memory = limit_bytes, memory
        self.num_bytes = 0
        self._pages: list[int] = []  # of the account
        self._roots: dict[str, Node] = {}
        self._ticks = 0

    @property
    def num_pages(self) -> int:
        """Pages of the account that forgetting everything would free."""
        return len(self._pages)

    def find(self, sequence: Sequence, token_ids: SequenceOf[int]) -> Found:
        """What is known of `token_ids`; at least one token is left to compute."""
        tokens = np.asarray(token_ids, np.int64)
        most = len(tokens) - 1
        matched = self._match(sequence.request.cache_salt, tokens)
        branch = min(sum(count for _, count in matched), most)
        stateful, length, nodes = is_stateful(sequence), 0, []
        usable = kept = 0
        for node, count in matched:
            if sequence.drafts and node.drafter_rows is None:
                break
            nodes.append(node)
            length += count
            if not stateful:
                usable, kept = min(length, most), len(nodes)
            elif node.state is not None and count == len(node.token_ids) and length <= most:
                usable, kept = length, len(nodes)
        if usable < LEAST_TOKENS:
            return Found(branch=branch)
        self._touch(nodes[:kept])
        return Found(usable, tuple(nodes[:kept]), branch)

    def restore(self, found: Found, sequence: Sequence) -> None:
        """Begin the sequence's empty caches with what was found."""
        left, rows, drafter_rows = found.length, [], []
        for node in found.nodes:
            count = min(left, len(node.token_ids))
            left -= count
            rows.append(node.rows.part(0, count))
            if sequence.drafts:
                drafter_rows.append(node.drafter_rows.part(0, count))
        state = found.nodes[-1].state if is_stateful(sequence) else no_state(sequence.target_state)
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
        if not self._make_room(len(tokens) * size.row_bytes + size.state_bytes, tokens, sequence.request.cache_salt):
            return False
        node, start = self._roots.setdefault(sequence.request.cache_salt, Node(np.empty(0, np.int64))), 0
        for each, count in self._match(sequence.request.cache_salt, tokens):
            node = each if count == len(each.token_ids) else split(each, count)
            if drafter is not None and node.drafter_rows is None:
                self.num_bytes += self._enrich(node, drafter_rows=drafter.copy_rows(start, start + count))
            self._touch([node])
            start += count
        if start < len(tokens):
            node = Node(tokens[start:].copy(), node)
            node.parent.children[int(tokens[start])] = node
            self._touch([node])
            drafted = drafter.copy_rows(start, len(tokens)) if drafter is not None else None
            self.num_bytes += self._enrich(node, rows=cache.copy_rows(start, len(tokens)), drafter_rows=drafted)
        if is_stateful(sequence) and node.state is None:
            self.num_bytes += self._enrich(node, state=cache.copy_state())
        self._settle()
        return True

    def free_pages(self, count: int) -> None:
        """Forget until `count` more pages of the account are free, or nothing is left."""
        wanted = self.memory.pages.num_free + count
        while self.memory.pages.num_free < wanted and self._forget_one():
            pass

    def clear(self) -> None:
        """Forget everything."""
        while self._forget_one():
            pass
        self._roots.clear()

    def _match(self, salt: str, tokens: np.ndarray) -> list[tuple[Node, int]]:
        """The nodes along `tokens`, and how many tokens of each agree: all of them, but of the last."""
        node, start, matched = self._roots.get(salt), 0, []
        while node is not None and start < len(tokens):
            node = node.children.get(int(tokens[start]))
            if node is not None:
                count = common_length(node.token_ids, tokens[start:])
                matched.append((node, count))
                start += count
                if count < len(node.token_ids):
                    break
        return matched

    def _make_room(self, num_bytes: int, tokens: np.ndarray, salt: str) -> bool:
        """Forget, but not of what lies along `tokens`, until so many bytes more may be held. Never takes a page that a
        running sequence holds."""
        keep = [node for node, _ in self._match(salt, tokens)]
        # What is shared need not be copied again.
        wanted = self.num_bytes + max(num_bytes - sum(node.row_bytes for node in keep[:-1]), 0)
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

    def _forget_one(self, keep: SequenceOf[Node] = ()) -> bool:
        """Forget the leaf that was used least recently, none of `keep`; False where there is none."""
        leaves = [node for node in self._nodes() if not node.children and node not in keep]
        if not leaves:
            return False
        oldest = min(leaves, key=lambda node: node.last_used)
        del oldest.parent.children[int(oldest.token_ids[0])]
        self.num_bytes -= oldest.num_bytes
        self._settle()
        return True

    def _touch(self, nodes: SequenceOf[Node]) -> None:
        self._ticks += 1
        for node in nodes:
            node.last_used = self._ticks

    def _nodes(self) -> Iterator[Node]:
        """All but the roots."""
        left = [child for root in self._roots.values() for child in root.children.values()]
        while left:
            node = left.pop()
            left.extend(node.children.values())
            yield node


def split(node: Node, count: int) -> Node:
    """Cut a node's segment in two; returns the upper part, which has no state."""
    upper = Node(node.token_ids[:count].copy(), node.parent, last_used=node.last_used)
    for name in ("rows", "drafter_rows"):
        whole = getattr(node, name)
        if whole is not None:
            setattr(upper, name, whole.part(0, count).copied())
            setattr(node, name, whole.part(count, whole.num_rows).copied())
    node.parent.children[int(upper.token_ids[0])] = upper
    node.token_ids, node.parent = node.token_ids[count:].copy(), upper
    upper.children[int(node.token_ids[0])] = node
    return upper


def remembers(sequence: Sequence) -> bool:
    """Whether the sequence's caches can be copied and begun with: those of the eager engine can."""
    drafter = sequence.drafter_state
    known = isinstance(sequence.target_state, ModelCache) and (drafter is None or isinstance(drafter, ModelCache))
    return known and sequence.request.cache_salt is not None


def is_stateful(sequence: Sequence) -> bool:
    """Whether rows alone do not say what the target remembers: a hybrid."""
    return sequence.target_state.size.state_bytes > 0


def no_state(cache: ModelCache) -> SavedState:
    """The state of layers that keep rows."""
    return SavedState(tuple(() for _ in cache.layers))


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens in which two sequences agree from the start."""
    count = min(len(one), len(other))
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if len(differs) else count
