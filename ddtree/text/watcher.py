"""A generation's text as the engine emits its tokens: detokenised, cut before a stop string, ready to stream."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ddtree.text.detokenize import Detokenizer
from ddtree.text.stops import StopStrings
from ddtree.text.tokenizer import Tokenizer


class TextWatcher:
    """The engine's TokenWatcher for text. The engine's thread feeds; the same or another one takes the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str] = (),
        hidden_ids: Collection[int] = frozenset(),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        shown_ids: Collection[int] = frozenset(),
    ) -> None:
        """`hidden_ids` (EOS and stop ids) have no text, `shown_ids` have it though special.

        Stop strings count from the `min_tokens`-th token on.
        """
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, shown_ids)
        self._stops = StopStrings(stops)
        self._hidden_ids = frozenset(hidden_ids)
        self._min_tokens = min_tokens
        self._pieces: list[str] = []  # every safe piece so far; appended only, so a reader needs no lock
        self._num_taken = 0
        self._num_decoded = 0
        self._finished = False
        self.token_offsets: list[int] = []  # characters of text decoded before each token

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.found

    @property
    def text(self) -> str:
        """All text that is safe so far; after `finish()` the whole text."""
        return "".join(self._pieces)

    def feed(self, token_id: int) -> str | None:
        """Take one emitted token; return the stop string that its text completes, or None."""
        self.token_offsets.append(self._num_decoded)
        if token_id in self._hidden_ids:
            return None
        return self._append(self._detokenizer.feed(token_id))

    def take(self) -> str:
        """The text that has become safe since the last call."""
        pieces = self._pieces[self._num_taken :]
        self._num_taken += len(pieces)
        return "".join(pieces)

    def finish(self) -> str:
        """No more tokens come: the rest of the text, held-back ends included unless a stop string matched."""
        if not self._finished:
            self._finished = True
            self._append(self._detokenizer.flush())
            self._pieces.append(self._stops.flush())
        return self.take()

    def _append(self, text: str) -> str | None:
        self._num_decoded += len(text)
        safe, stop = self._stops.feed(text, armed=len(self.token_offsets) >= self._min_tokens)
        if safe:
            self._pieces.append(safe)
        return stop
