"""The one place where the server meets the text room: a tokenizer becomes prompts, watchers and plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.server.errors import InvalidRequest
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

    def watcher(self, prompt: Prompt, stops: Iterable[str], hidden_ids: frozenset[int]) -> ServedWatcher:
        """What reads one generation's tokens."""
        if prompt.thought is None:
            return ServedWatcher(TextWatcher(self._tokenizer, stops, hidden_ids))
        text = TextWatcher(self._tokenizer, stops, hidden_ids, shown_ids=self._tokenizer.thought_tag_ids)
        return ServedWatcher(text, ReasoningParser(prompt.thought))


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
