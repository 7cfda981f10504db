"""The body of /v1/messages and its token count, checked and turned into a chat request; the rest is refused."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ddtree.server.chat import ChatRequest
from ddtree.server.errors import InvalidRequest, shown
from ddtree.server.faults import from_validation
from ddtree.server.fields import Wire
from ddtree.server.generation import CARRIED
from ddtree.server.tokens import TokenizeRequest

# Chat's names of fields -> this API's, for what is refused later on.
NAMES = (
    (r"\b(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
    (r"^stop\b", "stop_sequences"),
    (r"^thinking_budget\b", "thinking.budget_tokens"),
    (r"^enable_thinking\b(.*)send true$", r"thinking.type\1send enabled"),
    (r"^enable_thinking\b(.*)send false$", r"thinking.type\1send disabled"),
)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountTokensRequest(Wire):
    """Body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages. Fields of CARRIED are in `model_extra` and checked as a chat request's."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def chat_of(body: MessagesRequest) -> ChatRequest:
    """The same request in chat's words; InvalidRequest in this API's."""
    extra = body.model_extra or {}
    fields = {name: extra[name] for name in CARRIED if name in extra} | _common(body)
    fields |= {"stream": body.stream, "max_tokens": body.max_tokens, "stop": body.stop_sequences}
    choice = body.tool_choice or {}
    if choice.get("type") == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice:
        if choice.get("type") not in tuple(CHOICES):  # not the dict: what a client sends may have no hash
            raise InvalidRequest(
                f"tool_choice.type: must be auto, any, tool or none, got {shown(choice.get('type'))}", "tool_choice"
            )
        fields["tool_choice"] = CHOICES[choice["type"]]
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None


def tokenize_of(body: CountTokensRequest) -> TokenizeRequest:
    """The prompt alone."""
    try:
        return TokenizeRequest.model_validate(_common(body))
    except ValidationError as error:
        raise from_validation(error) from None


def _common(body: CountTokensRequest) -> dict[str, Any]:
    """Messages, tools and the thinking switch."""
    fields: dict[str, Any] = {"messages": _messages(body)}
    if body.tools and (body.tool_choice or {}).get("type") != "none":
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    switch = {None: None, "adaptive": None, "enabled": True, "disabled": False}
    kind = (body.thinking or {}).get("type")
    if kind not in tuple(switch):
        raise InvalidRequest(f"thinking.type: must be enabled, adaptive or disabled, got {shown(kind)}", "thinking")
    if switch[kind] is not None:
        fields["enable_thinking"] = switch[kind]
    if (body.thinking or {}).get("budget_tokens") is not None:
        fields["thinking_budget"] = body.thinking["budget_tokens"]
    return fields


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    if not body.messages:
        raise InvalidRequest("messages: must not be empty", "messages")
    system = _text(body.system or "", "system")
    messages = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(body.messages):
        where = f"messages[{place}]"
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{where}.role: must be user or assistant, got {shown(role)}", where)
        content = message.get("content")
        if role != "assistant":
            messages += _user(role, content, where)
        else:
            messages.append(_assistant(content, where))
    if messages[-1]["role"] == "assistant":
        raise InvalidRequest(
            "messages: the last one is the assistant's, and to continue it is not supported: end with the user",
            "messages",
        )
    return messages


def _user(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """Results of tools come first, as messages of their own; then the text."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results, texts = [], []
    for i, block in enumerate(_blocks(content, f"{where}.content")):
        here = f"{where}.content[{i}]"
        if block.get("type") == "tool_result":
            result = _text(block.get("content") or "", f"{here}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            texts.append(_block_text(block, here))
    return [*results, {"role": role, "content": "\n".join(texts)}] if texts or not results else results


def _assistant(content: Any, where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for i, block in enumerate(_blocks(content, f"{where}.content")):
        here = f"{where}.content[{i}]"
        kind = block.get("type")
        if kind == "tool_use":
            if not isinstance(block.get("input", {}), dict):
                raise InvalidRequest(f"{here}.input: must be an object, got {shown(block['input'])}", here)
            if not isinstance(block.get("name"), str):
                raise InvalidRequest(f"{here}.name: must be a string, got {shown(block.get('name'))}", here)
            function = {
                "name": block["name"],
                "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
            }
            message.setdefault("tool_calls", []).append(
                {"id": block.get("id"), "type": "function", "function": function}
            )
        elif kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise InvalidRequest(f"{here}.thinking: must be a string, got {shown(block.get('thinking'))}", here)
            message["reasoning_content"] = message.get("reasoning_content", "") + block["thinking"]
        elif kind != "redacted_thinking":
            message["content"] += _block_text(block, here)
    return message


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise InvalidRequest(f"{where}: must be a string or a list of blocks, got {shown(content)}", where)


def _text(content: Any, where: str) -> str:
    """The text of a string or of text blocks; anything else is refused by name."""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(_blocks(content, where)))


def _block_text(block: dict[str, Any], where: str) -> str:
    kind, text = block.get("type"), block.get("text")
    if kind != "text":
        raise InvalidRequest(f"{where}.type: {shown(kind)} blocks are not supported here: send text", where)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text: must be a string, got {shown(text)}", where)
    return text


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom") or "input_schema" not in tool:
        raise InvalidRequest(
            f"{where}: only tools with an input_schema are supported, got type {shown(tool.get('type'))}", where
        )
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}
