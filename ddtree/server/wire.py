"""The exact shapes of OpenAI's answers, whole and in chunks, for chat and for completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddtree import __version__
from ddtree.engine.request import RequestStats
from ddtree.server.batch import Piece
from ddtree.server.choices import Choice
from ddtree.server.errors import ApiError
from ddtree.server.logprobs import LogprobShaper
from ddtree.server.prepare import Prepared
from ddtree.server.report import ddtree_object, usage_object
from ddtree.server.sse import DONE, event
from ddtree.server.trace import TraceShaper
from ddtree.text import CallPart

FINGERPRINT = f"ddtree-{__version__}"


@dataclass(frozen=True)
class Wire:
    """Shapes one request's answer. Chat and completions differ in the choices alone."""

    model: str
    prepared: Prepared
    chat: bool
    return_token_ids: bool
    include_usage: bool
    logprobs: tuple[LogprobShaper, ...] | None = None  # one per choice, if the request wants them
    trace: TraceShaper | None = None  # likewise
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, choices: Sequence[Choice]) -> dict:
        """The whole answer."""
        return self._frame("chat.completion" if self.chat else "text_completion") | {
            "choices": [self._choice(choice, several=len(choices) > 1) for choice in choices],
            "usage": self._usage(choices),
            "ddtree": self._ddtree([choice.stats for choice in choices]),
        }

    def begin(self, choices: Sequence[Choice]) -> list[bytes]:
        """See stream.WireShape."""
        openings = (self.opening(choice.index) for choice in choices)
        return [event(opening) for opening in openings if opening]

    def step(self, piece: Piece, choices: Sequence[Choice]) -> list[bytes]:
        """See stream.WireShape."""
        choice = choices[piece.index]
        chunk = self.delta(piece, choice)
        chunks = [event(chunk)] if chunk else []
        if piece.emission.trace is not None and self.trace is not None:
            # Before its text, which may be held back: whoever reads the text knows its round.
            chunks.insert(0, event(self.traced(piece)))
        return [*chunks, event(self.closing(choice, choices))] if choice.finish_reason else chunks

    def end(self, choices: Sequence[Choice]) -> list[bytes]:
        """See stream.WireShape."""
        return [event(self.usage_chunk(choices)), DONE] if self.include_usage else [DONE]

    def fault(self, error: ApiError) -> list[bytes]:
        """See stream.WireShape."""
        return [event(error.body())]

    def opening(self, index: int) -> dict | None:
        """The chunk that carries the role; completions have none."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) if self.chat else None

    def delta(self, piece: Piece, choice: Choice) -> dict | None:
        """What a piece, already added to its choice, adds; None if it shows nothing yet."""
        shown, token_ids = piece.shown, list(piece.emission.token_ids)
        tokens = {"token_ids": token_ids} if self.return_token_ids else {}
        if self.logprobs is not None and token_ids:
            tokens["logprobs"] = self.logprobs[piece.index].shape(piece.emission.logprobs)
        if not (shown.text or shown.reasoning or shown.calls or (tokens and token_ids)):
            return None
        if not self.chat:
            return self._chunk(piece.index, {"text": shown.text, **tokens})
        delta = {"reasoning_content": shown.reasoning} if shown.reasoning else {}
        if shown.calls:
            delta["tool_calls"] = [call_delta(choice, kind, text) for kind, text in shown.calls]
        if shown.text or not delta:
            delta["content"] = shown.text
        return self._chunk(piece.index, {"delta": delta, **tokens})

    def traced(self, piece: Piece) -> dict:
        """A decode round, in a chunk without choices."""
        frame = self._chunk_frame() | {"choices": []} | ({"usage": None} if self.include_usage else {})
        return frame | {"ddtree_trace": self.trace.shape(piece.index, piece.emission)}

    def closing(self, choice: Choice, choices: Sequence[Choice]) -> dict:
        """An empty delta with the reason; the last one of the stream carries the whole `ddtree` object."""
        fields = {"delta": {}} if self.chat else {"text": ""}
        fields |= {"finish_reason": choice.finish_reason_shown, "stop_reason": choice.stop_reason}
        if self.return_token_ids:
            fields["token_ids"] = []
        if len(choices) > 1:
            fields["ddtree"] = self._ddtree([choice.stats])
        chunk = self._chunk(choice.index, fields)
        if all(each.finish_reason for each in choices):
            chunk["ddtree"] = self._ddtree([each.stats for each in choices])
        return chunk

    def usage_chunk(self, choices: Sequence[Choice]) -> dict:
        """What stream_options.include_usage asks for, after everything else."""
        chunk = self._chunk_frame() | {"choices": [], "usage": self._usage(choices)}
        return chunk | {"ddtree": self._ddtree([each.stats for each in choices])}

    def _frame(self, kind: str) -> dict:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk_frame(self) -> dict:
        return self._frame("chat.completion.chunk" if self.chat else "text_completion")

    def _chunk(self, index: int, fields: dict) -> dict:
        choice = {"index": index, "logprobs": None, "finish_reason": None} | fields
        chunk = self._chunk_frame() | {"choices": [choice]}
        # OpenAI's rule: with include_usage every chunk has the field, null in all but the last.
        return chunk | {"usage": None} if self.include_usage else chunk

    def _choice(self, choice: Choice, several: bool) -> dict:
        fields: dict = {"index": choice.index, "logprobs": None}
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs[choice.index].shape(choice.logprobs)
        if self.chat:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            if self._may_think:
                message["reasoning_content"] = choice.reasoning or None
            if choice.calls:
                message["content"] = choice.text or None
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in choice.calls
                ]
            fields["message"] = message
        else:
            fields["text"] = choice.text
        fields |= {"finish_reason": choice.finish_reason_shown, "stop_reason": choice.stop_reason}
        if self.return_token_ids:
            fields["token_ids"] = choice.token_ids
        if several:
            fields["ddtree"] = self._ddtree([choice.stats])
        return fields

    def _usage(self, choices: Sequence[Choice]) -> dict:
        return usage_object(
            self.prepared.num_prompt_tokens,
            sum(len(choice.token_ids) for choice in choices),
            sum(choice.stats.cached_tokens for choice in choices if choice.stats),
            sum(choice.num_reasoning for choice in choices) if self._may_think else None,
        )

    def _ddtree(self, stats: Sequence[RequestStats | None]) -> dict:
        known = [each for each in stats if each is not None]
        return ddtree_object(known, self.prepared.tree_budget_requested, self.prepared.seed)

    @property
    def _may_think(self) -> bool:
        return any(prompt.may_think for prompt in self.prepared.prompts)


def call_delta(choice: Choice, kind: CallPart, text: str) -> dict:
    """A piece of a call: its id and name come once and first, then its arguments."""
    if kind.part == "name":
        function = {"name": text, "arguments": ""}
        return {"index": kind.index, "id": choice.calls[kind.index].id, "type": "function", "function": function}
    return {"index": kind.index, "function": {"arguments": text}}
