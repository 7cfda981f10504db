"""The exact shapes of /v1/responses: the response object, its output items, and its typed events in rising order."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ddtree.server.batch import Piece
from ddtree.server.choices import Choice
from ddtree.server.errors import ApiError
from ddtree.server.items import Change, Item, ItemKind, Items
from ddtree.server.prepare import DEFAULT_TEMPERATURE, DEFAULT_TOP_P, Prepared
from ddtree.server.report import ddtree_object
from ddtree.server.responses import ResponsesRequest
from ddtree.server.sse import event

ECHOED = ("instructions", "max_output_tokens", "metadata", "user")


class ResponsesWire:
    """Shapes one answer. The names of the events are OpenAI's."""

    def __init__(self, model: str, prepared: Prepared, body: ResponsesRequest):
        self._model, self._prepared, self._body = model, prepared, body
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items = Items()
        self._num_events = 0

    def response(self, choices: Sequence[Choice]) -> dict:
        """The whole answer."""
        choice = choices[0]
        items = Items.of(choice.spans).items
        cut = choice.finish_reason == "length"
        # Only the last item can have been cut.
        output = [self._item(item, "incomplete" if cut and item is items[-1] else "completed") for item in items]
        return self._frame("incomplete" if cut else "completed", output) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": self._usage(choice),
            "ddtree": ddtree_object(
                [choice.stats] if choice.stats else [], self._prepared.tree_budget_requested, self._prepared.seed
            ),
        }

    def begin(self, choices: Sequence[Choice]) -> list[bytes]:
        """See stream.WireShape."""
        return [
            self._event(f"response.{name}", response=self._frame("in_progress", []))
            for name in ("created", "in_progress")
        ]

    def step(self, piece: Piece, choices: Sequence[Choice]) -> list[bytes]:
        """See stream.WireShape."""
        changes = self._items.add(piece.shown.spans)
        return [each for change in changes for each in self._changed(*change)]

    def end(self, choices: Sequence[Choice]) -> list[bytes]:
        """See stream.WireShape."""
        status = "incomplete" if choices[0].finish_reason == "length" else "completed"
        events = [each for change in self._items.close() for each in self._changed(*change, status=status)]
        whole = self.response(choices)
        # The items of the stream, so that ids are the same in both.
        for item, streamed in zip(whole["output"], self._items.items, strict=True):
            item["id"] = _item_id(streamed)
            if streamed.kind is ItemKind.CALL:
                item["call_id"] = f"call_{streamed.id}"
        return [*events, self._event(f"response.{status}", response=whole)]

    def fault(self, error: ApiError) -> list[bytes]:
        """See stream.WireShape."""
        failed = self._frame("failed", []) | {"error": {"code": error.code or "server_error", "message": error.message}}
        return [self._event("response.failed", response=failed)]

    def _changed(self, change: Change, place: int, text: str, status: str = "completed") -> list[bytes]:
        item = self._items.items[place]
        where: dict[str, Any] = {"output_index": place, "item_id": _item_id(item)}
        part = where | {"content_index": 0}
        kind = {ItemKind.THOUGHT: "reasoning_text", ItemKind.TEXT: "output_text"}.get(
            item.kind, "function_call_arguments"
        )
        logprobs = {"logprobs": []} if item.kind is ItemKind.TEXT else {}
        if change is Change.OPENED:
            added = self._event(
                "response.output_item.added", output_index=place, item=self._item(item, "in_progress", empty=True)
            )
            if item.kind is ItemKind.CALL:
                return [added]
            return [added, self._event("response.content_part.added", **part, part=_part(item.kind, ""))]
        if change is Change.GREW:
            return [
                self._event(
                    f"response.{kind}.delta", **(where if item.kind is ItemKind.CALL else part), delta=text, **logprobs
                )
            ]
        if item.kind is ItemKind.CALL:
            done = [self._event(f"response.{kind}.done", **where, arguments=item.text, name=item.name)]
        else:
            done = [
                self._event(f"response.{kind}.done", **part, text=item.text, **logprobs),
                self._event("response.content_part.done", **part, part=_part(item.kind, item.text)),
            ]
        return [*done, self._event("response.output_item.done", output_index=place, item=self._item(item, status))]

    def _item(self, item: Item, status: str, empty: bool = False) -> dict:
        shaped = {"id": _item_id(item), "status": status}
        if item.kind is ItemKind.CALL:
            arguments = "" if empty else item.text
            return shaped | {
                "type": "function_call",
                "call_id": f"call_{item.id}",
                "name": item.name,
                "arguments": arguments,
            }
        content = [] if empty else [_part(item.kind, item.text)]
        if item.kind is ItemKind.THOUGHT:
            return shaped | {"type": "reasoning", "summary": [], "content": content}
        return shaped | {"type": "message", "role": "assistant", "content": content}

    def _frame(self, status: str, output: list[dict]) -> dict:
        body, extra = self._body, self._body.model_extra or {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": extra.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": _given(extra.get("temperature"), DEFAULT_TEMPERATURE),
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": _given(extra.get("top_p"), DEFAULT_TOP_P),
            "truncation": "disabled",
            "usage": None,
            **{name: getattr(body, name) for name in ECHOED},
        }

    def _usage(self, choice: Choice) -> dict:
        num_input, num_output = self._prepared.num_prompt_tokens, len(choice.token_ids)
        cached = choice.stats.cached_tokens if choice.stats else 0
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning},
            "total_tokens": num_input + num_output,
        }

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _item_id(item: Item) -> str:
    return {ItemKind.THOUGHT: "rs_", ItemKind.TEXT: "msg_", ItemKind.CALL: "fc_"}[item.kind] + item.id


def _part(kind: ItemKind, text: str) -> dict:
    if kind is ItemKind.THOUGHT:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _given(value: Any, default: float) -> Any:
    return default if value is None else value
