"""One generation in this process: prompt in, text as it comes, stats at the end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ddtree.engine.request import Request, RequestStats
from ddtree.sampling.params import SamplingParams
from ddtree.text import TextWatcher, Tokenizer


@dataclass
class Turn:
    """Iterate for pieces of text; afterwards `stats` and `finish_reason` are there."""

    engine: object
    tokenizer: Tokenizer
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    tree_budget: int | str = 0
    stopped: Callable[[], bool] = lambda: False  # asked before each step
    stats: RequestStats | None = None
    finish_reason: str | None = None
    text: str = field(default="", init=False)
    lengths: list[int] = field(default_factory=list, init=False)  # tokens that each round brought so far
    num_brought: int = field(default=0, init=False)  # tokens of the round that the last piece came with; prefill brings 1

    def __iter__(self) -> Iterator[str]:
        request_id = self.engine.add(self._request())
        try:
            while self.finish_reason is None and not self.stopped():
                for emission in self.engine.step():
                    yield from self._read(emission)
        finally:
            # Also when Ctrl-C ends it early.
            if self.finish_reason is None:
                self.engine.abort(request_id)

    def _read(self, emission) -> Iterator[str]:
        if emission.finish_reason == "error":
            raise ValueError(f"generation failed: {emission.error}")
        self.finish_reason, self.stats = emission.finish_reason, emission.stats
        piece = self._watcher.take() + (self._watcher.finish() if emission.finish_reason else "")
        self.text += piece
        if self.num_brought:
            self.lengths.append(len(emission.token_ids))
        else:
            self._began = time.perf_counter()
        self.num_brought = len(emission.token_ids)
        if piece:
            yield piece

    def tokens_per_s(self) -> float | None:
        """Of the rounds so far; None before the first."""
        return sum(self.lengths) / (time.perf_counter() - self._began) if self.lengths else None

    def _request(self) -> Request:
        room = self.engine.config.max_context - len(self.prompt_token_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(self.prompt_token_ids)} tokens, the context is "
                f"{self.engine.config.max_context} tokens: shorten it"
            )
        eos_token_ids = frozenset(self.tokenizer.eos_token_ids)
        self._watcher = TextWatcher(self.tokenizer, hidden_ids=eos_token_ids)
        return Request(
            prompt_token_ids=tuple(self.prompt_token_ids),
            max_tokens=min(self.max_tokens, room),
            sampling=SamplingParams(temperature=self.temperature),
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            tree_budget=self.tree_budget,
            eos_token_ids=eos_token_ids,
            watcher=self._watcher,
        )


def summary(turn: Turn) -> str:
    """Acceptance and speed of a finished turn, in one line. What lay after a stop is not counted."""
    stats = turn.stats
    parts = [f"{stats.output_tokens} tokens", f"ended by {turn.finish_reason}"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.mode != "target_only" and turn.lengths:
        mean = sum(turn.lengths) / len(turn.lengths)
        parts.append(f"acceptance length {mean:.2f} at tree budget {stats.tree_budget}")
    else:
        parts.append("plain decoding" + (f" ({stats.reason})" if stats.reason else ""))
    return ", ".join(parts)
