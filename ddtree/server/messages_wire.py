"""The exact shapes of /v1/messages: the message, its content blocks, and its events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from ddtree.server.batch import Piece
from ddtree.server.choices import Choice
from ddtree.server.errors import ApiError, anthropic_envelope
from ddtree.server.items import Change, Item, ItemKind, Items
from ddtree.server.prepare import Prepared
from ddtree.server.report import ddtree_object
from ddtree.server.sse import event


class MessagesWire:
    """Shapes one answer. The names of the events are Anthropic's."""

    def __init__(self, model: str, prepared: Prepared):
        self._model, self._prepared = model, prepared
        self._id = f"msg_{uuid.uuid4().hex[:24]}"
        self._items = Items()

    def response(self, choices: Sequence[Choice]) -> dict:
        """The whole answer."""
        choice = choices[0]
        content = [_block(item) for item in Items.of(choice.spans).items]
        return self._frame(content, self._usage(choice)) | _stop(choice) | {"ddtree": self._ddtree(choice)}

    def begin(self, choices: Sequence[Choice]) -> list[bytes]:
        """See stream.WireShape."""
        usage = self._usage(choices[0])
        return [_event("message_start", message=self._frame([], usage))]

    def step(self, piece: Piece, choices: Sequence[Choice]) -> list[bytes]:
        """See stream.WireShape."""
        return self._changed(self._items.add(piece.shown.spans))

    def end(self, choices: Sequence[Choice]) -> list[bytes]:
        """See stream.WireShape."""
        choice = choices[0]
        usage = self._usage(choice)
        delta = _event("message_delta", delta=_stop(choice), usage=usage, ddtree=self._ddtree(choice))
        return [*self._changed(self._items.close()), delta, _event("message_stop")]

    def fault(self, error: ApiError) -> list[bytes]:
        """See stream.WireShape."""
        return [event(anthropic_envelope(error.status, error.message), "error")]

    def _changed(self, changes: Sequence[tuple[Change, int, str]]) -> list[bytes]:
        events = []
        for change, place, text in changes:
            item = self._items.items[place]
            if change is Change.OPENED:
                opening = {ItemKind.TEXT: {"text": ""}, ItemKind.THOUGHT: {"thinking": "", "signature": ""}}
                block = _block(item) | opening.get(item.kind, {"input": {}})
                events.append(_event("content_block_start", index=place, content_block=block))
            elif change is Change.GREW:
                kind, name = {
                    ItemKind.TEXT: ("text_delta", "text"),
                    ItemKind.THOUGHT: ("thinking_delta", "thinking"),
                    ItemKind.CALL: ("input_json_delta", "partial_json"),
                }[item.kind]
                events.append(_event("content_block_delta", index=place, delta={"type": kind, name: text}))
            else:
                events.append(_event("content_block_stop", index=place))
        return events

    def _frame(self, content: list[dict], usage: dict) -> dict:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, choice: Choice) -> dict:
        # In this API the tokens read from a cache are no part of input_tokens; at the start of a stream none are known yet.
        cached = choice.stats.cached_tokens if choice.stats else 0
        return {
            "input_tokens": self._prepared.num_prompt_tokens - cached,
            "output_tokens": len(choice.token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }

    def _ddtree(self, choice: Choice) -> dict:
        stats = [choice.stats] if choice.stats else []
        return ddtree_object(stats, self._prepared.tree_budget_requested, self._prepared.seed)


def _stop(choice: Choice) -> dict[str, Any]:
    """Why it ended, and the stop sequence if that was it."""
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "tool_use" if choice.calls else "end_turn", "stop_sequence": None}


def _block(item: Item) -> dict:
    if item.kind is ItemKind.TEXT:
        return {"type": "text", "text": item.text}
    if item.kind is ItemKind.THOUGHT:
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{item.id}", "name": item.name, "input": _input(item.text)}


def _input(arguments: str) -> dict:
    """The arguments as an object; what max_tokens cut off is none."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
