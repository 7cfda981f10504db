"""What the engine's thread does with each token of a served request: text, stop strings, thought or answer."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.text import ReasoningParser, TextWatcher
from ddtree.text.parse import REASONING


@dataclass(frozen=True)
class Shown:
    """Text that became showable, and how many of the tokens behind it belong to a thought."""

    text: str = ""
    reasoning: str = ""
    num_reasoning: int = 0


class ServedWatcher:
    """A TokenWatcher for the engine. Fed and read in the engine's thread, so that nothing is read half-written."""

    def __init__(self, text: TextWatcher, parser: ReasoningParser | None = None):
        self._text = text
        self._parser = parser
        self._shown = ""
        self._reasoning = ""
        self._num_reasoning = 0

    def feed(self, token_id: int) -> str | None:
        """Take one token; returns the stop string that it completes."""
        stop = self._text.feed(token_id)
        if self._parser is not None:
            # Token by token, so that the count does not depend on how many a round emits.
            self._num_reasoning += self._parser.in_reasoning
            self._split(self._parser.feed(self._text.take()))
        return stop

    def take(self, last: bool = False) -> Shown:
        """What became showable since the last call; with `last`, everything that was held back."""
        text = self._text.take() + (self._text.finish() if last else "")
        if self._parser is None:
            return Shown(text)
        self._split(self._parser.feed(text))
        if last:
            self._split(self._parser.flush())
        shown = Shown(self._shown, self._reasoning, self._num_reasoning)
        self._shown, self._reasoning, self._num_reasoning = "", "", 0
        return shown

    def _split(self, spans: list[tuple[str, str]]) -> None:
        for kind, text in spans:
            if kind == REASONING:
                self._reasoning += text
            else:
                self._shown += text
