"""The one place where the server meets the text room: a tokenizer becomes prompts, watchers and plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.engine.request import Request
from ddtree.server.errors import InvalidRequest
from ddtree.server.logprobs import ChatLogprobs, CompletionLogprobs, LogprobShaper
from ddtree.server.protocol import ChatRequest, TokenizeRequest
from ddtree.server.watch import ServedWatcher
from ddtree.text import ReasoningParser, TextWatcher, Thought, Tokenizer, render_chat, thought_state


@dataclass(frozen=True)
class Prompt:
    """Token ids, and how the answer to them is to be read."""

    token_ids: tuple[int, ...]
    thought: Thought | None = None  # where the prompt leaves it; None: the answer is not split

    @property
    def may_think(self) -> bool:
        """Is the answer split into thought and content?"""
        return self.thought is not None


class Text:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_ids = frozenset(tokenizer.eos_token_ids)

    def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text that `param` held."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def chat(self, body: ChatRequest | TokenizeRequest) -> Prompt:
        """Render the model's own template; it brings its own special tokens."""
        for index, message in enumerate(body.messages):
            _refuse_tools(message, f"messages[{index}]")
        try:
            rendered = render_chat(
                self._tokenizer,
                body.messages,
                enable_thinking=body.enable_thinking,
                chat_template_kwargs=body.chat_template_kwargs,
            )
        except ValueError as error:
            raise _named(error) from None
        token_ids = self.encode(rendered, "messages", add_special_tokens=False)
        return Prompt(tuple(token_ids), thought_state(rendered, self._tokenizer.chat_template))

    def watcher(
        self, prompt: Prompt, stops: Iterable[str], hidden_ids: frozenset[int], min_tokens: int = 0
    ) -> ServedWatcher:
        """What reads one generation's tokens."""
        shown_ids = frozenset() if prompt.thought is None else self._tokenizer.thought_tag_ids
        text = TextWatcher(self._tokenizer, stops, hidden_ids, min_tokens=min_tokens, shown_ids=shown_ids)
        return ServedWatcher(text, *([] if prompt.thought is None else [ReasoningParser(prompt.thought)]))

    def logprobs(self, request: Request, chat: bool) -> LogprobShaper:
        """What shapes one choice's log-probabilities."""
        if chat:
            return ChatLogprobs(self._tokenizer)
        return CompletionLogprobs(self._tokenizer, request.eos_token_ids | request.stop_token_ids)


def _refuse_tools(message: dict[str, Any], where: str) -> None:
    if message.get("role") in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise InvalidRequest(
            f"{where}: tool calls and their results are not supported: put them into the text of a message",
            where,
            "unsupported_parameter",
        )


def _named(error: ValueError) -> InvalidRequest:
    """The text room begins its messages with the field."""
    field, colon, _ = str(error).partition(":")
    return InvalidRequest(str(error), field if colon and " " not in field else "messages")
