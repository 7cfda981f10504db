"""Chat messages as clients send them, brought to the one form that templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
Message = dict[str, Any]


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Contents as strings, `developer` as `system`, all system messages merged into one at the start.

    ValueError naming the place and the value: no messages, an unknown role, a part that is not text.
    """
    if not messages:
        raise ValueError("messages: must not be empty")
    system: list[str] = []
    others: list[Message] = []
    for i, message in enumerate(messages):
        normal = _normal_message(message, f"messages[{i}]")
        if normal["role"] == "system":
            system.append(normal["content"])
        else:
            others.append(normal)
    # Templates want one system message and want it first, wherever the client put its several.
    merged = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return merged + others


def _normal_message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: must be an object with role and content, got {_kind(message)}")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        known = ", ".join((*ROLES, "developer"))
        raise ValueError(f"{where}.role: must be one of {known}, got {_kind(role)}")
    # Templates test for a field's presence, so a null one must not be there.
    normal = {key: value for key, value in message.items() if value is not None}
    normal["role"] = role
    normal["content"] = _text(message.get("content"), f"{where}.content")
    if not isinstance(normal.get("reasoning_content", ""), str):
        kind = _kind(normal["reasoning_content"])
        raise ValueError(f"{where}.reasoning_content: must be a string or null, got {kind}")
    if "tool_calls" in normal:
        if not isinstance(normal["tool_calls"], list | tuple):
            kind = _kind(normal["tool_calls"])
            raise ValueError(f"{where}.tool_calls: must be a list or null, got {kind}")
        normal["tool_calls"] = [_normal_call(call, where) for call in normal["tool_calls"]]
    return normal


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}: must be a string, a list of text parts or null, got {_kind(content)}")
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"{where}: must be a text part, got {_kind(part)}")
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise ValueError(f"{where}.type: {_kind(kind)} parts are not supported; this server reads text only")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text: must be a string, got {_kind(part.get('text'))}")
    return part["text"]


def _normal_call(call: Any, where: str) -> Any:
    """Arguments arrive as JSON text; templates that walk through them need the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError(f"{where}.tool_calls: must be objects with a function, got {_kind(call)}")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            raise ValueError(f"{where}.tool_calls: arguments are not JSON ({error})") from error
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    return {**call, "function": function}


def _kind(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
