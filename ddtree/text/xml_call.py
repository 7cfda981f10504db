"""One call as Qwen3-Coder writes it, `<function=NAME><parameter=P>VALUE</parameter>…</function>`, turned into JSON.

Values of string parameters stream; others are JSON and wait for their end. The newline after a tag and the one before
the next are the format's, not the value's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
Part = tuple[str, str]


class XmlCall:
    """Gives out ("name", text) once and ("arguments", JSON text) as it comes."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        """`tools`: name -> text.tools.Tool; their schemas say which values are strings."""
        self._tools = tools
        self._held = ""
        self._read = self._read_name
        self._properties: Mapping[str, Any] = {}
        self._parameter = ""
        self._num_parameters = 0
        self._started = False  # the value's first character has been seen
        self.has_name = False

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain with this text."""
        self._held += text
        parts: list[Part] = []
        while True:
            found = self._read()
            if found is None:
                return parts
            parts += found

    def end(self) -> list[Part]:
        """The call ends here; a forgotten end tag is made up for."""
        if self._read in (self._read_text, self._read_json):
            self._held += PARAMETER_END
            return [*self.feed(""), *self.end()]
        if self._read != self._read_between:
            return []
        self._read = self._ignore
        return [("arguments", "}" if self._num_parameters else "{}")]

    def _read_name(self) -> list[Part] | None:
        _, tag, rest = self._held.partition(FUNCTION)
        name, close, rest = rest.partition(">")
        if not tag or not close:
            return None
        self._held, self._read, self.has_name = rest, self._read_between, True
        tool = self._tools.get(name.strip())
        self._properties = (tool.parameters.get("properties") or {}) if tool else {}
        return [("name", name.strip())]

    def _read_between(self) -> list[Part] | None:
        start, end = self._held.find(PARAMETER), self._held.find(FUNCTION_END)
        if end >= 0 and (start < 0 or end < start):
            return self.end()
        close = self._held.find(">", start)
        if start < 0 or close < 0:
            return None
        self._parameter = self._held[start + len(PARAMETER) : close].strip()
        self._held, self._started = self._held[close + 1 :], False
        lead = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        parts = [("arguments", f"{lead}{json.dumps(self._parameter, ensure_ascii=False)}: ")]
        self._read = self._read_text if self._is_string() else self._read_json
        return parts + ([("arguments", '"')] if self._is_string() else [])

    def _read_text(self) -> list[Part] | None:
        """A string's characters, all but a newline and a piece of the end tag, which wait."""
        if not self._started:
            if not self._held:
                return None
            self._held, self._started = self._held.removeprefix("\n"), True
        value, tag, rest = self._held.partition(PARAMETER_END)
        if tag:
            self._held, self._read = rest, self._read_between
            return [("arguments", _escaped(value.removesuffix("\n")) + '"')]
        certain = _before_tag(value)
        self._held = value[len(certain) :]
        return [("arguments", _escaped(certain))] if certain else None

    def _read_json(self) -> list[Part] | None:
        value, tag, rest = self._held.partition(PARAMETER_END)
        if not tag:
            return None
        self._held, self._read = rest, self._read_between
        return [("arguments", _as_json(value.strip()))]

    def _ignore(self) -> None:
        self._held = ""

    def _is_string(self) -> bool:
        schema = self._properties.get(self._parameter)
        return isinstance(schema, Mapping) and schema.get("type") == "string"


def _before_tag(text: str) -> str:
    """The text without what may yet turn out to be `\\n</parameter>`."""
    tag = "\n" + PARAMETER_END
    for start in (tag, PARAMETER_END):
        for length in range(min(len(start) - 1, len(text)), 0, -1):
            if text.endswith(start[:length]):
                return text[:-length]
    return text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(value: str) -> str:
    """JSON as it was written; Python's and other words for the three constants; any other text as a string."""
    constant = {"true": "true", "false": "false", "null": "null", "none": "null"}.get(value.lower())
    if constant:
        return constant
    try:
        json.loads(value)
        return value
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
