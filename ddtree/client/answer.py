"""What a server said, in one shape for both endpoints, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One choice. None where the server does not say."""

    text: str  # a thought comes first
    thought: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    report: dict | None = None  # the `ddtree` object
    top_logprobs: tuple[dict[str, float], ...] = ()  # per token, of a raw completion that asked for them

    @property
    def histogram(self) -> dict[int, int]:
        """Acceptance length -> rounds."""
        return {int(length): count for length, count in ((self.report or {}).get("acceptance_histogram") or {}).items()}


def answer_of(body: dict) -> Answer:
    """From a whole response of either endpoint. ValueError where it has no choice."""
    if not body.get("choices"):
        raise ValueError(f"the response has no choices: {str(body)[:200]}")
    choice, usage = body["choices"][0], body.get("usage") or {}
    message = choice.get("message") or {}
    thought = message.get("reasoning_content") or ""
    content = choice.get("text") if "text" in choice else message.get("content")
    ids = choice.get("token_ids")
    logprobs = choice.get("logprobs") or {}
    return Answer(
        thought + (content or ""), thought, None if ids is None else tuple(ids), choice.get("finish_reason"),
        usage.get("prompt_tokens"), usage.get("completion_tokens"), body.get("ddtree"), tuple(logprobs.get("top_logprobs") or ()),
    )  # fmt: skip


def answer_of_stream(events: Iterable[dict]) -> Answer:
    """The deltas of a stream put together. ValueError for an error event."""
    text, thought, ids, finish, usage, report = "", "", None, None, {}, None
    for event in events:
        if "error" in event:
            raise ValueError(f"the stream failed: {event['error']}")
        usage, report = event.get("usage") or usage, event.get("ddtree") or report
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            thought += delta.get("reasoning_content") or ""
            text += choice.get("text") or delta.get("content") or ""
            if choice.get("token_ids") is not None:
                ids = (*(ids or ()), *choice["token_ids"])
            finish = choice.get("finish_reason") or finish
    return Answer(
        thought + text, thought, ids, finish, usage.get("prompt_tokens"), usage.get("completion_tokens"), report
    )
