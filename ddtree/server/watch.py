"""What the engine's thread does with each token of a served request: text, stop strings, thought or answer."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ddtree.text import CallPart, ParserChain, ReasoningParser, SpanParser, TextWatcher
from ddtree.text.parse import CONTENT, REASONING, Span


@dataclass(frozen=True)
class Shown:
    """Text that became showable; with the last piece, how many tokens of the generation belong to its thought."""

    text: str = ""
    reasoning: str = ""
    num_reasoning: int = 0
    calls: tuple[tuple[CallPart, str], ...] = ()  # pieces of tool calls, in order
    spans: tuple[Span, ...] = ()  # all of it in order


class ServedWatcher:
    """A TokenWatcher for the engine. Fed and read in the engine's thread, so that nothing is read half-written."""

    def __init__(self, text: TextWatcher, *parsers: SpanParser):
        """Each parser reads what those before it called content; without any, all text is."""
        self._text = text
        self._parser = ParserChain(*parsers)
        self._thought = next((parser for parser in parsers if isinstance(parser, ReasoningParser)), None)

    def feed(self, token_id: int) -> str | None:
        """Take one token; returns the stop string that it completes."""
        return self._text.feed(token_id)

    def take(self, last: bool = False) -> Shown:
        """What became showable since the last call; with `last`, everything that was held back."""
        spans = self._parser.feed(self._text.take() + (self._text.finish() if last else ""))
        if last:
            spans += self._parser.flush()
        reasoning = "".join(text for kind, text in spans if kind == REASONING)
        shown = "".join(text for kind, text in spans if kind == CONTENT)
        calls = tuple((kind, text) for kind, text in spans if isinstance(kind, CallPart))
        return Shown(shown, reasoning, self._num_reasoning() if last else 0, calls, tuple(spans))

    def _num_reasoning(self) -> int:
        """Tokens that begin inside the thought, its tags included; by place, as one token may close it late."""
        if self._thought is None or self._thought.thought_start is None:
            return 0
        starts, end = self._text.token_offsets, self._thought.thought_end
        first = bisect_left(starts, self._thought.thought_start)
        return (len(starts) if end is None else bisect_left(starts, end)) - first
