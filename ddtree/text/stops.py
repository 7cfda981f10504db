"""Stop strings over text that comes in pieces of any size.

The earliest match wins: the one that is *completed* first, and of those completed by the same character the longest.
That is the one definition that does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Finds the first stop string; holds back only a suffix that is a proper prefix of one."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        """ValueError for an empty stop string, which would match everywhere."""
        self._stops = sorted(set(stops), key=len, reverse=True)  # longest first: it wins a tie
        if "" in self._stops:
            raise ValueError("stop: a stop string must not be empty")
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # leading characters of each stop that the text now ends with
        self._held = ""
        self._found: str | None = None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._found

    def feed(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """The text that cannot belong to a stop string, and the stop string completed in it, if any.

        After a match all further text is dropped. Not `armed` (min_tokens not reached): a match is plain text.
        """
        if self._found is not None:
            return "", self._found
        if not self._stops:
            return text, None
        buffer = self._held + text
        for place, char in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(char, armed)
            if stop is not None:
                self._found, self._held = stop, ""
                return buffer[: place - len(stop)], stop
        safe = len(buffer) - max(self._matched)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str, armed: bool) -> str | None:
        """Take one character into every automaton; the longest stop string that it completes."""
        completed = None
        for i, stop in enumerate(self._stops):
            fallbacks, length = self._fallbacks[i], self._matched[i]
            while length and stop[length] != char:
                length = fallbacks[length]
            length += stop[length] == char
            if length == len(stop):
                if armed and completed is None:
                    completed = stop
                length = fallbacks[length]
            self._matched[i] = length
        return completed


def _fallbacks(stop: str) -> list[int]:
    """Knuth-Morris-Pratt: entry n is the longest proper prefix of the stop that its first n characters end with."""
    table = [0, 0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = table[length]
        length += stop[length] == char
        table.append(length)
    return table
