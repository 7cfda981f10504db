"""One call as Hermes and Qwen write it, `{"name": …, "arguments": {…}}`, read character by character."""

from __future__ import annotations

import json
from enum import Enum, auto

ARGUMENTS = ("arguments", "parameters")
Part = tuple[str, str]


class Place(Enum):
    """What the next character belongs to."""

    OPENING = auto()  # before {
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    DONE = auto()  # after }; whatever follows is ignored
    BROKEN = auto()  # this is no call


class HermesCall:
    """Gives out ("name", text) once and ("arguments", JSON text) as it comes; arguments before the name wait for it."""

    def __init__(self) -> None:
        self._place = Place.OPENING
        self._token = ""  # the key or the value being read
        self._depth, self._in_string, self._escaped = 0, False, False
        self._key = ""
        self._arguments: str | None = None  # read, not yet given out
        self._gave_arguments = False
        self.has_name = False

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain with this text."""
        parts: list[Part] = []
        for char in text:
            parts += self._read(char)
        return parts

    def end(self) -> list[Part]:
        """The call ends here: one that named no arguments has none."""
        return [] if self._gave_arguments or not self.has_name else [("arguments", "{}")]

    def _read(self, char: str) -> list[Part]:
        if self._place is Place.VALUE:
            return self._read_value(char)
        if self._place is Place.KEY and (self._token or char == '"'):
            self._read_key(char)
        elif self._place in (Place.DONE, Place.BROKEN) or char.isspace():
            pass
        else:
            self._place = {
                (Place.OPENING, "{"): Place.KEY,
                (Place.KEY, "}"): Place.DONE,
                (Place.COLON, ":"): Place.VALUE,
                (Place.COMMA, ","): Place.KEY,
                (Place.COMMA, "}"): Place.DONE,
            }.get((self._place, char), Place.BROKEN)
        return []

    def _read_key(self, char: str) -> None:
        self._token += char
        if self._closes_string(char) and len(self._token) > 1:
            self._key, self._token, self._place = _decoded(self._token) or "", "", Place.COLON

    def _read_value(self, char: str) -> list[Part]:
        """A value ends with its own last character, but for a bare one (true, 5), which the next , or } ends."""
        if not self._token and char.isspace():
            return []
        if not self._in_string and self._depth == 0 and self._token and self._token[0] not in '"{[' and char in ",}\n ":
            parts = self._finish_value()
            return parts + self._read(char)
        self._token += char
        closed = self._closes_string(char)
        if not self._in_string and not closed:
            self._depth += (char in "{[") - (char in "}]")
        streams = self._key in ARGUMENTS and self._token[0] == "{"
        parts = self._stream(char) if streams else []
        if self._depth == 0 and not self._in_string and (closed or char in "}]"):
            return parts + self._finish_value(streamed=streams)
        return parts

    def _closes_string(self, char: str) -> bool:
        """Follow strings; true where this character ends one."""
        if self._in_string and self._escaped:
            self._escaped = False
        elif self._in_string and char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = not self._in_string
            return not self._in_string
        return False

    def _finish_value(self, streamed: bool = False) -> list[Part]:
        value, self._token, self._place = self._token, "", Place.COMMA
        if streamed:
            return []
        if self._key == "name" and not self.has_name:
            name = _decoded(value)
            if not isinstance(name, str) or not name:
                self._place = Place.BROKEN
                return []
            self.has_name = True
            waiting, self._arguments = self._arguments, None
            return [("name", name)] + ([("arguments", waiting)] if waiting else [])
        if self._key in ARGUMENTS:
            decoded = _decoded(value)
            # Some models write the arguments as a string that holds JSON.
            return self._stream(decoded if isinstance(decoded, str) else "{}" if decoded is None else value)
        return []

    def _stream(self, text: str) -> list[Part]:
        self._gave_arguments = True
        if self.has_name:
            return [("arguments", text)]
        self._arguments = (self._arguments or "") + text
        return []


def _decoded(token: str) -> object:
    """The JSON value of a token, None if it has none."""
    try:
        return json.loads(token)
    except ValueError:
        return None
