"""Tool calls in generated text: how each family of models writes them, read piece by piece, and as a grammar.

Hermes and Qwen:  <tool_call>{"name": …, "arguments": {…}}</tool_call>
Qwen3-Coder, 3.5: <tool_call><function=NAME><parameter=P>VALUE</parameter>…</function></tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ddtree.text.grammar import json_rule
from ddtree.text.hermes_call import HermesCall
from ddtree.text.parse import CALL_END, CALL_START, CONTENT, Span, merge, overlap
from ddtree.text.xml_call import XmlCall


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    XML = "xml"  # Qwen3-Coder's


def tool_format(template: str | None) -> ToolFormat | None:
    """What the model's own template tells it to write; None where it shows neither form."""
    if template is None or CALL_START not in template:
        return None
    return ToolFormat.XML if "<function=" in template else ToolFormat.HERMES


@dataclass(frozen=True)
class Tool:
    """One function that the model may call; `parameters` is its JSON Schema."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class CallPart:
    """The kind of a span that belongs to a call: the call's place in the answer, and `name` or `arguments`."""

    index: int
    part: str


class ToolParser:
    """The SpanParser of calls: content, then per call a name and JSON arguments, as they become certain.

    White space around a call belongs to nobody. What stands between the tags and is no call is content, tags and all.
    """

    def __init__(self, format: ToolFormat, tools: Sequence[Tool]) -> None:
        self._format, self._tools = format, {tool.name: tool for tool in tools}
        self._held = ""
        self._call: HermesCall | XmlCall | None = None
        self._raw = ""  # the call so far, should it turn out to be none
        self._space = ""  # what stood before the call, dropped unless it turns out to be none
        self._after_call = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Span]:
        """See SpanParser."""
        self._held += text
        spans: list[Span] = []
        while True:
            found = self._read_content() if self._call is None else self._read_call()
            if found is None:
                return merge(spans)
            spans += found

    def flush(self) -> list[Span]:
        """See SpanParser. A call that was cut off keeps what is known of it."""
        spans: list[Span] = []
        if self._call is not None:
            spans = self._parts(self._call.feed(self._held))
            if not self._call.has_name:
                spans = [(CONTENT, self._space + CALL_START + self._raw + self._held)]
        elif self._held and not (self._after_call and self._held.isspace()):
            spans = [(CONTENT, self._held)]
        self._held, self._call = "", None
        return merge(spans)

    def _read_content(self) -> list[Span] | None:
        """Text up to the next call; None when more has to come."""
        text = self._held.lstrip() if self._after_call else self._held
        before, tag, rest = text.partition(CALL_START)
        if tag:
            self._held, self._raw, self._after_call = rest, "", False
            self._space = before[len(before.rstrip()) :]
            self._call = HermesCall() if self._format is ToolFormat.HERMES else XmlCall(self._tools)
            return [(CONTENT, before.rstrip())]
        certain = text[: len(text) - overlap(text, CALL_START)].rstrip()
        self._held = text[len(certain) :]
        if certain:
            self._after_call = False
            # White space may have been dropped after a call; what follows it is content as it stands.
            return [(CONTENT, certain)]
        return None

    def _read_call(self) -> list[Span] | None:
        body, tag, rest = self._held.partition(CALL_END)
        certain = body if tag else body[: len(body) - overlap(body, CALL_END)]
        if not tag and not certain:
            return None
        self._held = rest if tag else self._held[len(certain) :]
        self._raw += certain
        spans = self._parts(self._call.feed(certain))
        if not tag:
            return spans
        spans += self._parts(self._call.end())
        self._after_call = self._call.has_name
        if self._after_call:
            self.num_calls += 1
        else:
            spans = [(CONTENT, self._space + CALL_START + self._raw + CALL_END)]
        self._call = None
        return spans

    def _parts(self, parts: Sequence[tuple[str, str]]) -> list[Span]:
        return [(CallPart(self.num_calls, part), text) for part, text in parts]


def calls_lark(format: ToolFormat, tools: Sequence[Tool], several: bool, text: bool = False) -> str:
    """Rules for `answer`: one call of any of the tools, or with `several` at least one; with `text` also text alone,
    or text and then calls."""
    choice = " | ".join(f"tool_{i}" for i in range(len(tools)))
    more = f' ("\\n{CALL_START}\\n" call)*' if several else ""
    if text:
        lines = [
            f"answer: PLAIN | before call{more}",
            f"PLAIN: /(?s:.*)/ & ~/(?s:.*){CALL_START}(?s:.*)/",
            f"before[lazy]: /(?s:.*){CALL_START}\\n/",
        ]
    else:
        lines = [f'answer: "{CALL_START}\\n" call{more}']
    lines.append(f'call: ({choice}) "\\n{CALL_END}"')
    for i, tool in enumerate(tools):
        lines += _hermes_rules(i, tool) if format is ToolFormat.HERMES else _xml_rules(i, tool)
    return "\n".join(lines) + "\n"


def _hermes_rules(i: int, tool: Tool) -> list[str]:
    head = json.dumps(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    return [f'tool_{i}: {head} args_{i} "}}"', f"args_{i}: {json_rule(_object(tool.parameters))}"]


def _xml_rules(i: int, tool: Tool) -> list[str]:
    schema = _object(tool.parameters)
    required = schema.get("required") or ()
    rules, order = [], []
    for k, (name, value) in enumerate((schema.get("properties") or {}).items()):
        order.append(f"param_{i}_{k}" + ("" if name in required else "?"))
        rules.append(
            f"param_{i}_{k}: {json.dumps(f'<parameter={name}>' + chr(10))} {_xml_value(i, k, value, schema, rules)}"
        )
    head = json.dumps(f"<function={tool.name}>\n")
    return [f'tool_{i}: {head} {" ".join(order)} "</function>"', *rules]


def _xml_value(i: int, k: int, value: Any, schema: Mapping[str, Any], rules: list[str]) -> str:
    """A value and its end tag: text as it is where the schema says string, JSON elsewhere."""
    end = "\n</parameter>\n"
    if isinstance(value, Mapping) and value.get("type") == "string":
        if choices := value.get("enum"):
            return "(" + " | ".join(json.dumps(f"{choice}{end}", ensure_ascii=False) for choice in choices) + ")"
        rules.append(f"text_{i}_{k}[lazy]: /(?s:.*)\\n<\\/parameter>\\n/")
        return f"text_{i}_{k}"
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules.append(f"json_{i}_{k}: {json_rule({**value, **definitions} if isinstance(value, Mapping) else value)}")
    return f"json_{i}_{k} {json.dumps(end)}"


def _object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A function without parameters takes an empty object."""
    return {"type": "object", "properties": {}, "additionalProperties": False} if not parameters else dict(parameters)
