"""One answer as the ordered items that /v1/responses and /v1/messages are made of: thoughts, texts, calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ddtree.text import CallPart
from ddtree.text.parse import REASONING, Span


class ItemKind(StrEnum):
    """What an item holds."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass
class Item:
    """`text` is the thought, the answer's text, or the call's arguments as JSON."""

    kind: ItemKind
    text: str = ""
    name: str = ""  # of the function called
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])


class Change(StrEnum):
    """What happened to an item."""

    OPENED = "opened"
    GREW = "grew"
    CLOSED = "closed"


class Items:
    """Items as they grow. One is open at a time: a new one closes the one before."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Items:
        """The items of a whole answer."""
        items = cls()
        items.add(spans)
        return items

    def add(self, spans: Iterable[Span]) -> list[tuple[Change, int, str]]:
        """What new text does: (change, place of the item, new text)."""
        changes: list[tuple[Change, int, str]] = []
        for kind, text in spans:
            if isinstance(kind, CallPart):
                if kind.part == "name":
                    changes += self._open(Item(ItemKind.CALL, name=text))
                    continue
            else:
                wanted = ItemKind.THOUGHT if kind == REASONING else ItemKind.TEXT
                if not self._is_open or self.items[-1].kind is not wanted:
                    changes += self._open(Item(wanted))
            self.items[-1].text += text
            changes.append((Change.GREW, len(self.items) - 1, text))
        return changes

    def close(self) -> list[tuple[Change, int, str]]:
        """The answer has ended."""
        was_open, self._is_open = self._is_open, False
        return [(Change.CLOSED, len(self.items) - 1, "")] if was_open else []

    def _open(self, item: Item) -> list[tuple[Change, int, str]]:
        changes = self.close()
        self.items.append(item)
        self._is_open = True
        return [*changes, (Change.OPENED, len(self.items) - 1, "")]
