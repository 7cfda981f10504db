"""Token ids to text as they come, giving out only what no later token can change.

The pieces concatenate exactly to `Tokenizer.decode` of all the ids. Two ways: byte-level vocabularies are decoded
byte by byte; the others (whose decoders look at neighbours) by comparing the decoded text before and after.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from ddtree.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """One generation's text. Special tokens are skipped by id, never by look."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown_ids: Collection[int] = frozenset()
    ) -> None:
        """`shown_ids` have text even where they are special: what a parser has to read."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids.difference(shown_ids) if skip_special_tokens else frozenset()
        self._by_bytes = tokenizer.vocabulary.is_byte_level
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # By comparison: `_window` holds the tokens already given out that the next ones are decoded after.
        self._window: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        """The text that has become certain with this token; "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        if self._by_bytes:
            return self._utf8.decode(self._tokenizer.vocabulary.token_bytes(token_id))
        # Decoding drops ids that no token has, so the tokens around one are neighbours.
        if not self._tokenizer.vocabulary.has(token_id):
            return ""
        self._pending.append(token_id)
        # A run of byte tokens is valid or invalid as a whole, so it must have ended.
        if self._tokenizer.vocabulary.is_byte_token(token_id):
            return ""
        return self._release(final=False)

    def flush(self) -> str:
        """The rest, with U+FFFD for what stayed incomplete."""
        if self._by_bytes:
            return self._utf8.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._window)
        after = self._decode(self._window + self._pending)
        if not final and (after.endswith(REPLACEMENT) or len(after) == len(before)):
            return ""
        self._window, self._pending = self._pending, []
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        # Skipped ids never come here: a window of nothing visible would lose the next token's leading space.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
