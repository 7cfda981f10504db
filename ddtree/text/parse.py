"""Split generated text into thought and answer, piece by piece.

As Qwen's own reading of its models has it: the thought is what lies between the tags without the newlines at its
ends, the answer is the rest without the newlines at its start. Text without a thought is answer, untouched. Only a tag
at the very start opens a thought, and only the first end tag closes it: later tags are somebody quoting.
"""

from __future__ import annotations

from collections.abc import Iterable

REASONING = "reasoning"
CONTENT = "content"
Span = tuple[str, str]


class ReasoningParser:
    """One generation. The concatenation per kind is the same however the text is cut into pieces."""

    def __init__(self, open: bool = False, start: str = "<think>", end: str = "</think>") -> None:
        """`open`: the prompt already opened the thought (`opens_thinking`), so the text starts inside it."""
        self._open = open
        self._start = start
        self._end = end
        self._held = ""
        self._read = self._read_start  # the reader of the part that we are in

    @property
    def in_reasoning(self) -> bool:
        """Does the next text belong to the thought, as far as is known? For counting reasoning tokens."""
        if self._read == self._read_start:
            return self._open
        return self._read in (self._read_thought_start, self._read_thought)

    def feed(self, text: str) -> list[Span]:
        """The spans that are certain with this text: ("reasoning" | "content", text), none of them empty."""
        return _merge(self._read(text))

    def flush(self) -> list[Span]:
        """The end of the text. A thought that never closed stays reasoning."""
        held, self._held = self._held, ""
        if self._read == self._read_start and not self._open:
            return _merge([(CONTENT, held)])
        return _merge([(REASONING, held.rstrip("\n"))])

    def _read_start(self, text: str) -> list[Span]:
        """White space and perhaps a piece of the start tag: not yet clear whether there is a thought."""
        self._held += text
        body = self._held.lstrip()
        if len(body) < len(self._start) and self._start.startswith(body):
            return []
        held, self._held = self._held, ""
        if body.startswith(self._start):
            # An open thought may repeat the tag; it is no part of the thought.
            held = body[len(self._start) :]
        elif not self._open:
            self._read = self._read_content
            return self._read(held)
        self._read = self._read_thought_start
        return self._read(held)

    def _read_thought_start(self, text: str) -> list[Span]:
        """The newlines after the start tag."""
        text = text.lstrip("\n")
        if not text:
            return []
        self._read = self._read_thought
        return self._read(text)

    def _read_thought(self, text: str) -> list[Span]:
        """The thought; newlines and a piece of the end tag wait for what follows them."""
        self._held += text
        thought, tag, answer = self._held.partition(self._end)
        if tag:
            self._held = ""
            self._read = self._read_answer_start
            return [(REASONING, thought.rstrip("\n")), *self._read(answer)]
        certain = self._held[: len(self._held) - _overlap(self._held, self._end)].rstrip("\n")
        self._held = self._held[len(certain) :]
        return [(REASONING, certain)]

    def _read_answer_start(self, text: str) -> list[Span]:
        """The newlines after the end tag."""
        text = text.lstrip("\n")
        if not text:
            return []
        self._read = self._read_content
        return self._read(text)

    def _read_content(self, text: str) -> list[Span]:
        return [(CONTENT, text)]


def _overlap(text: str, tag: str) -> int:
    """How many characters of a proper prefix of the tag the text ends with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _merge(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one kind joined, empty ones dropped."""
    merged: list[Span] = []
    for kind, text in spans:
        if merged and merged[-1][0] == kind:
            merged[-1] = (kind, merged[-1][1] + text)
        elif text:
            merged.append((kind, text))
    return merged
