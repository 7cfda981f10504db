"""A tree of segments: a path from a root spells a prefix, and each node keeps what its own tokens left behind.

Rows can be cut anywhere, so an attention-only target hits at any length; a hybrid hits only where a state was kept. What the
nodes keep, copies (`engine.prefix`) or pages (`engine.paged_prefix`), is theirs: here it is only handed on and let go.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from ddtree.caches.saved import SavedRows, SavedState
from ddtree.caches.shared import SharedRows, SharedState
from ddtree.engine.memory import Memory

LEAST_TOKENS = 16  # a shorter prefix is computed sooner than looked after


@dataclass(eq=False)
class Node:
    """One segment. A root has no tokens."""

    token_ids: np.ndarray  # [n] int64
    parent: Node | None = None
    rows: SavedRows | SharedRows | None = None
    drafter_rows: SavedRows | SharedRows | None = None  # None where nobody drafted
    state: SavedState | SharedState | None = None  # after the last token; None where none was kept, or the target needs none
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    last_used: int = 0

    @property
    def row_bytes(self) -> int:
        return sum(part.num_bytes for part in (self.rows, self.drafter_rows) if part is not None)

    @property
    def num_bytes(self) -> int:
        return self.row_bytes + (self.state.num_bytes if self.state is not None else 0)

    def release(self) -> None:
        """Let go of all that it keeps."""
        for part in (self.rows, self.drafter_rows, self.state):
            if part is not None:
                part.release()


@dataclass(frozen=True, eq=False)
class Found:
    """The longest usable prefix of a prompt."""

    length: int = 0
    nodes: tuple[Node, ...] = ()  # the last may be used in part
    branch: int = 0  # tokens shared with what is remembered, usable or not: here a state would have served


class PrefixTree:
    """Segments by salt and tokens, and forgetting those that were used least recently. `memory`: the account whose pages their
    parts hold; None where nobody counts."""

    def __init__(self, memory: Memory | None) -> None:
        self.memory = memory
        self._roots: dict[str, Node] = {}
        self._ticks = 0

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

    def _find(self, salt: str, token_ids: SequenceOf[int], *, drafts: bool, stateful: bool) -> Found:
        """What is known of `token_ids`; at least one token is left to compute. `drafts`: the drafter's context has to be
        known too; `stateful`: rows alone do not serve."""
        tokens = np.asarray(token_ids, np.int64)
        most = len(tokens) - 1
        matched = self._match(salt, tokens)
        branch = min(sum(count for _, count in matched), most)
        length, nodes = 0, []
        usable = kept = 0
        for node, count in matched:
            if (node.drafter_rows if drafts else node.rows) is None:
                break  # nobody drafted, or its copies failed
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

    def _path(self, salt: str, tokens: np.ndarray) -> Iterator[tuple[Node, int, int]]:
        """Nodes that spell exactly `tokens`, and where each starts and stops; cut and begun as need be. New ones are empty."""
        node, start = self._roots.setdefault(salt, Node(np.empty(0, np.int64))), 0
        for each, count in self._match(salt, tokens):
            node = each if count == len(each.token_ids) else split(each, count)
            self._touch([node])
            yield node, start, start + count
            start += count
        if start < len(tokens):
            node = Node(tokens[start:].copy(), node)
            node.parent.children[int(tokens[start])] = node
            self._touch([node])
            yield node, start, len(tokens)

    def _forget_one(self, keep: SequenceOf[Node] = ()) -> bool:
        """Forget the leaf that was used least recently, none of `keep`; False where there is none."""
        leaves = [node for node in self._nodes() if not node.children and node not in keep]
        if not leaves:
            return False
        oldest = min(leaves, key=lambda node: node.last_used)
        del oldest.parent.children[int(oldest.token_ids[0])]
        self._release(oldest)
        return True

    def _release(self, node: Node) -> None:
        """Let go of what a forgotten node keeps."""
        node.release()

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
    wholes = {name: getattr(node, name) for name in ("rows", "drafter_rows") if getattr(node, name) is not None}
    # All copies before any change: where one fails, the node is as it was.
    parts = {name: [whole.part(*ends).copied() for ends in ((0, count), (count, whole.num_rows))] for name, whole in wholes.items()}
    for name, (first, second) in parts.items():
        setattr(upper, name, first)
        setattr(node, name, second)
        wholes[name].release()
    node.parent.children[int(upper.token_ids[0])] = upper
    node.token_ids, node.parent = node.token_ids[count:].copy(), upper
    upper.children[int(node.token_ids[0])] = node
    return upper


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens in which two sequences agree from the start."""
    count = min(len(one), len(other))
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if len(differs) else count
