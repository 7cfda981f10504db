"""A model of one's own beside a server: its plain answers as text, and its margin where the two part."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ddtree.audit.findings import MISMATCH, NEAR_TIE
from ddtree.audit.noise import Noise, measure_noise, rescored
from ddtree.audit.prompts import CHAT
from ddtree.engine.request import Request


class Local:
    """`chat(tokenizer, text, thinking)` and `raw(tokenizer, text)` make the ids as a server does."""

    def __init__(self, engine, tokenizer, chat: Callable, raw: Callable, max_tokens: int, reference=None) -> None:
        self.engine, self.tokenizer, self.chat, self.raw = engine, tokenizer, chat, raw
        self.max_tokens, self.reference = max_tokens, reference
        self.noise: Noise | None = None

    def __call__(self, case) -> Iterator[tuple[str, str, Callable[[int], tuple[float | None, str]]]]:
        """(who, its text, margin and verdict at a character) of the local model and of transformers, where it is there."""
        ids = tuple(self.chat(self.tokenizer, case.text, case.thinking) if case.form == CHAT else self.raw(self.tokenizer, case.text))
        room = min(self.max_tokens, self.engine.config.max_context - len(ids))
        if room < 1:
            return
        request = Request(ids, max_tokens=room, eos_token_ids=frozenset(self.tokenizer.eos_token_ids))
        answers = {"the local model": list(self.engine.generate(request).token_ids)}
        if self.reference is not None:
            answers["transformers"] = self.reference(ids, room)
        for name, tokens in answers.items():
            yield name, self._text(tokens), lambda place, tokens=tokens: self._margin(request, tokens, place)

    def _text(self, tokens) -> str:
        return self.tokenizer.decode(tokens)

    def _margin(self, request: Request, tokens: list[int], place: int) -> tuple[float | None, str]:
        """At the token that writes character `place`."""
        if self.noise is None:
            self.noise = measure_noise(self.engine.target.model, [*request.prompt_token_ids, *tokens])
        number = next((k for k in range(len(tokens)) if len(self._text(tokens[: k + 1])) > place), None)
        if number is None:
            return None, MISMATCH
        margin = rescored(self.engine.target.model, request, [*request.prompt_token_ids, *tokens[:number]])[1]
        return margin, NEAR_TIE if margin <= self.noise.limit else MISMATCH
