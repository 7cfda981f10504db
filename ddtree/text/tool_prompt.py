"""Tools for models whose template has no place for them: told in the system message, in the form of Hermes and Qwen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree.text.messages import Message, normalise

INTRODUCTION = (
    "You may call functions to help with the user's request. Their signatures, one JSON object a line:\n"
    "<tools>\n{signatures}\n</tools>\n"
    "To call one, answer with its name and its arguments as JSON between tags, and nothing else:\n"
    '<tool_call>\n{{"name": "<name>", "arguments": {{…}}}}\n</tool_call>'
)


def spell_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation in plain system, user and assistant messages. ValueError as `normalise`."""
    told = [_told(message) for message in normalise(messages)]
    if not tools:
        return told
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = INTRODUCTION.format(signatures=signatures)
    if told and told[0]["role"] == "system":
        return [{"role": "system", "content": f"{told[0]['content']}\n\n{introduction}"}, *told[1:]]
    return [{"role": "system", "content": introduction}, *told]


def _told(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        written = {"name": function.get("name"), "arguments": function.get("arguments", {})}
        calls.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
    content = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {"role": "assistant", "content": content}
