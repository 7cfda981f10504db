"""The body of /v1/responses, checked and turned into a chat request; what it asks beyond that is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ddtree.server.chat import ChatRequest
from ddtree.server.errors import InvalidRequest, Names, shown
from ddtree.server.faults import from_validation
from ddtree.server.fields import Wire
from ddtree.server.generation import CARRIED

ROLES = ("user", "assistant", "system", "developer")
# What the parts of a message, of a result and of a refusal are called, and where their text is.
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# What of `reasoning.effort` a template can be told: whether to think.
EFFORTS = {None: None, "medium": None, "none": False, "minimal": False}


class ResponsesRequest(Wire):
    """Body of /v1/responses. Fields of CARRIED are in `model_extra` and checked as a chat request's."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """The same request in chat's words; InvalidRequest in this API's."""
    extra = body.model_extra or {}
    fields = {name: extra[name] for name in CARRIED if name in extra}
    fields |= {"stream": body.stream, "max_completion_tokens": body.max_output_tokens, "messages": _messages(body)}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    fields["response_format"] = _format(body.text or {})
    for wish in body.include or ():
        # Thoughts come in the open here, so a client that asks for them encrypted has them anyway.
        if wish != "reasoning.encrypted_content":
            raise InvalidRequest(f"include: {shown(wish)} is not supported: leave it out", "include")
    effort = (body.reasoning or {}).get("effort")
    if effort not in tuple(EFFORTS):  # not the dict: what a client sends may have no hash
        raise InvalidRequest(
            f'reasoning.effort: only "medium" and "none" are supported, got {shown(effort)}', "reasoning.effort"
        )
    if EFFORTS[effort] is not None:
        fields.setdefault("enable_thinking", EFFORTS[effort])
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None


def names(body: ResponsesRequest) -> Names:
    """Chat's names of fields -> this API's, for what is refused later on."""
    known = [
        (r"\bresponse_format(\.json_schema)?\b", "text.format"),
        (r"\bmax(_completion)?_tokens\b", "max_output_tokens"),
        (r"\b(tools\[\d+\])\.function\b", r"\1"),
        # Items and messages are not numbered alike: instructions are a message too.
        (r"^messages\b(\[\d+\])?", "input"),
    ]
    if (body.reasoning or {}).get("effort") is not None and "enable_thinking" not in (body.model_extra or {}):
        known += [("^enable_thinking", "reasoning.effort"), ("send true", 'send "medium"'), ("send false", 'send "none"')]
    return known


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise InvalidRequest("input is empty: send text or at least one item", "input")
    for place, item in enumerate(body.input):
        _add_item(messages, item, f"input[{place}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """One item as a message, or as part of the assistant message that it belongs to."""
    kind = item.get("type") or "message"
    if kind == "message" and item.get("role") in ROLES:
        message = {"role": item["role"], "content": _content(item.get("content"), f"{where}.content")}
        assistant = _assistant(messages) if item["role"] == "assistant" else None
        if assistant is not None and not assistant["content"] and "tool_calls" not in assistant:
            assistant["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        name, arguments = _string(item, "name", where), _string(item, "arguments", where) or "{}"
        call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
        _open_assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        thought = "".join(_reasoning_texts(item.get("content") or [], f"{where}.content"))
        if thought:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        field, known = "type", "message, function_call, function_call_output or reasoning"
        if kind == "message":
            field, known = "role", ", ".join(ROLES)
        what = shown(item.get(field))
        raise InvalidRequest(f"{where}.{field}: must be one of {known}, got {what}", f"{where}.{field}")


def _string(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise InvalidRequest(f"{where}.{name}: must be a string, got {shown(item.get(name))}", f"{where}.{name}")
    return item[name]


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The assistant message at the end, if there is one."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _open_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    message = _assistant(messages)
    if message is None:
        message = {"role": "assistant", "content": ""}
        messages.append(message)
    return message


def _content(content: Any, where: str) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return [{"type": "text", "text": _part_text(part, f"{where}[{i}]")} for i, part in enumerate(content)]
    raise InvalidRequest(f"{where}: must be a string or a list of parts, got {shown(content)}", where)


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where}: must be a part with a type and a text, got {shown(part)}", where)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in PARTS:
        raise InvalidRequest(
            f"{where}.type: {shown(kind)} parts are not supported: this server reads text only, send input_text", f"{where}.type"
        )
    text = part.get(PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{PARTS[kind]}: must be a string, got {shown(text)}", f"{where}.{PARTS[kind]}")
    return text


def _reasoning_texts(content: Any, where: str) -> list[str]:
    texts = [part.get("text") or "" for part in content if isinstance(part, dict)] if isinstance(content, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{where}: must be a list of parts with a text, got {shown(content)}", where)
    return texts


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        what = shown(tool.get("type"))
        raise InvalidRequest(f"{where}.type: only function tools are supported, got {what}: leave others out", f"{where}.type")
    # Here `strict` is true unless said otherwise, but clients send what strict schemas forbid: only an explicit one counts.
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(text: dict[str, Any]) -> dict[str, Any] | None:
    """`text.format` has the schema one level higher than chat's response_format."""
    if text.get("verbosity") not in (None, "medium"):
        raise InvalidRequest(
            f'text.verbosity: only "medium" is supported, got {shown(text["verbosity"])}', "text.verbosity"
        )
    found = text.get("format")
    if isinstance(found, dict) and found.get("type") == "json_schema":
        inner = {
            name: found[name] for name in ("name", "description", "schema", "strict") if found.get(name) is not None
        }
        return {"type": "json_schema", "json_schema": inner}
    return found
