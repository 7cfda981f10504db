"""Log-probabilities as OpenAI shapes them: objects per token for chat, parallel lists for completions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from ddtree.sampling.logprobs import TokenLogprob
from ddtree.text import Detokenizer, Tokenizer

LEAST = -9999.0  # OpenAI's number for a token of no probability; JSON has no infinity


class LogprobShaper(Protocol):
    """One choice's log-probabilities on the wire; stateful, so each token is shaped once, in order."""

    def shape(self, found: Sequence[TokenLogprob]) -> dict:
        """The `logprobs` object for these tokens."""
        ...


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`"""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def shape(self, found: Sequence[TokenLogprob]) -> dict:
        """See LogprobShaper."""
        content = [
            self._token(each.token_id, each.logprob)
            | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in each.top]}
            for each in found
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": shown_token(raw), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`; offsets in characters of the choice's own text."""

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int]):
        self._tokenizer, self._hidden_ids = tokenizer, hidden_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._num_characters = 0

    def shape(self, found: Sequence[TokenLogprob]) -> dict:
        """See LogprobShaper."""
        return {
            "tokens": [self._text(each.token_id) for each in found],
            "token_logprobs": [finite(each.logprob) for each in found],
            # The chosen token is always in, however improbable.
            "top_logprobs": [self._top((*each.top, (each.token_id, each.logprob))) for each in found],
            "text_offset": [self._offset(each.token_id) for each in found],
        }

    def _top(self, pairs: Iterable[tuple[int, float]]) -> dict[str, float]:
        return {self._text(token_id): finite(logprob) for token_id, logprob in pairs}

    def _offset(self, token_id: int) -> int:
        before = self._num_characters
        if token_id not in self._hidden_ids:
            self._num_characters += len(self._detokenizer.feed(token_id))
        return before

    def _text(self, token_id: int) -> str:
        return shown_token(self._tokenizer.token_bytes(token_id))


def shown_token(raw: bytes) -> str:
    """A token's text; a piece of a character in OpenAI's notation, `bytes:\\xe2\\x9c`, as two pieces must differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST
