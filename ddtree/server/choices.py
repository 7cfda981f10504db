"""One answer as it grows: text, thought, ids, and how it ended; and its shapes on the wire."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from ddtree.engine.request import RequestStats
from ddtree.sampling.logprobs import TokenLogprob
from ddtree.server.batch import Piece
from ddtree.server.errors import EngineFailed, Unavailable
from ddtree.text.parse import Span


@dataclass
class ToolCall:
    """One call of a choice. `arguments` is JSON text."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass
class Choice:
    """The pieces of one choice, put together."""

    index: int
    text: str = ""
    reasoning: str = ""
    num_reasoning: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # text, reasoning and calls in order
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stats: RequestStats | None = None

    def add(self, piece: Piece) -> None:
        """Append a piece; raises EngineFailed if the engine gave up on it, Unavailable if its time was up."""
        emission = piece.emission
        if emission.error_code is not None:
            raise Unavailable(emission.error, emission.error_code, retry_after_s=1)
        if emission.finish_reason in ("error", "abort"):
            raise EngineFailed(f"generation failed: {emission.error or emission.finish_reason}")
        self.text += piece.shown.text
        self.reasoning += piece.shown.reasoning
        self.num_reasoning += piece.shown.num_reasoning
        self.spans.extend(piece.shown.spans)
        for kind, text in piece.shown.calls:
            if kind.part == "name":
                self.calls.append(ToolCall(text))
            else:
                self.calls[kind.index].arguments += text
        self.token_ids.extend(emission.token_ids)
        self.logprobs.extend(emission.logprobs)
        self.finish_reason, self.stop_reason = emission.finish_reason, emission.stop_reason
        self.stats = emission.stats or self.stats

    @property
    def finish_reason_shown(self) -> str | None:
        """On the wire: an answer that ended by itself with calls in it ended for them."""
        return "tool_calls" if self.calls and self.finish_reason == "stop" else self.finish_reason
