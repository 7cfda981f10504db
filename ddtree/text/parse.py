"""Split generated text into thought and answer, piece by piece.

As Qwen's own reading of its models has it: the thought is what lies between the tags without the newlines at its
ends, the answer is the rest without the newlines at its start. Text without a thought is answer, untouched. Only a tag
at the very start opens a thought, and only the first end tag closes it: later tags are somebody quoting.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import StrEnum
from typing import Protocol

REASONING = "reasoning"
CONTENT = "content"
Span = tuple[Hashable, str]  # what kind of text, and the text

THINK_START = "<think>"
THINK_END = "</think>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"


class Thought(StrEnum):
    """Where the rendered prompt leaves the thought."""

    OPEN = "open"  # the prompt opened one: the text starts inside it
    CLOSED = "closed"  # the prompt closed one: all text is answer
    UNDECIDED = "undecided"  # the text itself may open one


class SpanParser(Protocol):
    """Cuts one generation's text into spans; the concatenation per kind is the same however the text arrives."""

    def feed(self, text: str) -> list[Span]:
        """The spans that are certain with this text, (kind, text), none of them empty."""

    def flush(self) -> list[Span]:
        """The spans that were held back, now that the text has ended."""


class ParserChain:
    """Several parsers as one: each reads what those before it called content."""

    def __init__(self, *parsers: SpanParser) -> None:
        self._parsers = parsers

    def feed(self, text: str) -> list[Span]:
        """See SpanParser."""
        spans: list[Span] = [(CONTENT, text)]
        for parser in self._parsers:
            spans = _through(parser, spans)
        return merge(spans)

    def flush(self) -> list[Span]:
        """See SpanParser."""
        spans: list[Span] = []
        for parser in self._parsers:
            spans = [*_through(parser, spans), *parser.flush()]
        return merge(spans)


def _through(parser: SpanParser, spans: Iterable[Span]) -> list[Span]:
    return [new for span in spans for new in (parser.feed(span[1]) if span[0] == CONTENT else [span])]


class ReasoningParser:
    """The SpanParser of thoughts. `thought_start` and `thought_end` are places in the text fed, the tags included."""

    def __init__(
        self, thought: Thought = Thought.UNDECIDED, start: str = THINK_START, end: str = THINK_END
    ) -> None:
        """`thought`: what the rendered prompt says (`text.chat.thought_state`)."""
        self._open = thought is Thought.OPEN
        self._start = start
        self._end = end
        self._held = ""
        self._num_fed = 0
        self._read = self._read_content if thought is Thought.CLOSED else self._read_start  # of the part we are in
        self.thought_start: int | None = 0 if self._open else None
        self.thought_end: int | None = None

    def feed(self, text: str) -> list[Span]:
        """The spans that are certain with this text: ("reasoning" | "content", text), none of them empty."""
        self._num_fed += len(text)
        return merge(self._read(text))

    def flush(self) -> list[Span]:
        """The end of the text. A thought that never closed stays reasoning."""
        held, self._held = self._held, ""
        if self._read == self._read_start and not self._open:
            return merge([(CONTENT, held)])
        return merge([(REASONING, held.rstrip("\n"))])

    def _read_start(self, text: str) -> list[Span]:
        """White space and perhaps a piece of the start tag: not yet clear whether there is a thought."""
        self._held += text
        body = self._held.lstrip()
        if len(body) < len(self._start) and self._start.startswith(body):
            return []
        held, self._held = self._held, ""
        if body.startswith(self._start):
            if self.thought_start is None:
                self.thought_start = self._num_fed - len(body)
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
            self.thought_end = self._num_fed - len(answer)
            self._read = self._read_answer_start
            return [(REASONING, thought.rstrip("\n")), *self._read(answer)]
        certain = self._held[: len(self._held) - overlap(self._held, self._end)].rstrip("\n")
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


def overlap(text: str, tag: str) -> int:
    """How many characters of a proper prefix of the tag the text ends with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def merge(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one kind joined, empty ones dropped."""
    merged: list[Span] = []
    for kind, text in spans:
        if merged and merged[-1][0] == kind:
            merged[-1] = (kind, merged[-1][1] + text)
        elif text:
            merged.append((kind, text))
    return merged
