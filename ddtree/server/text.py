"""The one place where the server meets the text room: a tokenizer becomes prompts, watchers and plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ddtree.engine.request import Request
from ddtree.server.errors import InvalidRequest
from ddtree.server.logprobs import ChatLogprobs, CompletionLogprobs, LogprobShaper
from ddtree.server.trace import TraceShaper
from ddtree.server.watch import ServedWatcher
from ddtree.text import (
    Grammar,
    GrammarCompiler,
    ReasoningParser,
    SpanParser,
    TextWatcher,
    Thought,
    ThoughtLimit,
    Tokenizer,
    Tool,
    ToolFormat,
    ToolParser,
    render_chat,
    thought_state,
    tool_format,
)
from ddtree.text.grammar import schema_lark, whole_lark
from ddtree.text.tool_prompt import spell_out
from ddtree.text.tools import calls_lark

if TYPE_CHECKING:  # as types alone: the audit renders prompts where there is no pydantic
    from ddtree.server.chat import ChatRequest
    from ddtree.server.generation import Generation
    from ddtree.server.tokens import TokenizeRequest


@dataclass(frozen=True)
class Prompt:
    """Token ids, and how the answer to them is to be read."""

    token_ids: tuple[int, ...]
    thought: Thought | None = None  # where the prompt leaves it; None: the answer is not split
    tools: tuple[Tool, ...] = ()  # what the answer may call
    tool_format: ToolFormat = ToolFormat.HERMES
    boundaries: tuple[int, ...] = ()  # lengths at which later prompts may part from this one: the end of the last message

    @property
    def may_think(self) -> bool:
        """Is the answer split into thought and content?"""
        return self.thought is not None


class Text:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self._compiler: GrammarCompiler | None = None  # made for the first request that needs one

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
            _refuse_functions(message, f"messages[{index}]")
        told, messages = body.tools_told, body.messages
        template = self._tokenizer.chat_template_for(bool(told))
        format = tool_format(template)
        try:
            if format is None and (told or any(map(_has_tools, messages))):
                # The template has no place for them, or writes calls in a form that is not read here.
                messages, format = spell_out(messages, told), ToolFormat.HERMES
                told = []
            render = partial(
                render_chat,
                self._tokenizer,
                messages,
                enable_thinking=body.enable_thinking,
                chat_template_kwargs=body.chat_template_kwargs,
                tools=told,
            )
            rendered = render()
        except ValueError as error:
            raise _named(error) from None
        token_ids = self.encode(rendered, "messages", add_special_tokens=False)
        functions = [each["function"] for each in body.tools_told]
        tools = tuple(Tool(function["name"], function.get("parameters") or {}) for function in functions)
        thought, boundaries = thought_state(rendered, template), self._boundaries(render, rendered, token_ids)
        return Prompt(tuple(token_ids), thought, tools, format or ToolFormat.HERMES, boundaries)

    def _boundaries(self, render: Callable[..., str], rendered: str, token_ids: list[int]) -> tuple[int, ...]:
        """Where the last message ends: what follows, such as an opened thought, is not in the next turn's prompt."""
        try:
            messages = render(add_generation_prompt=False)
        except ValueError:
            return ()
        head, tail = rendered[: len(messages)], rendered[len(messages) :]
        if head != messages or not tail:
            return ()
        after = self._tokenizer.encode(tail, add_special_tokens=False)
        length = len(token_ids) - len(after)
        return (length,) if length > 0 and list(token_ids[length:]) == list(after) else ()

    def grammar(self, body: Generation, prompt: Prompt, vocab_size: int) -> Grammar | ThoughtLimit | None:
        """What bounds the answer, if the request says so; InvalidRequest if there is no such grammar."""
        shape = self._shape(body, prompt, vocab_size)
        if prompt.thought in (Thought.OPEN, Thought.UNDECIDED) and body.thinking_budget is not None:
            return ThoughtLimit(self._tokenizer, vocab_size, prompt.thought, body.thinking_budget, shape)
        return shape

    def _shape(self, body: Generation, prompt: Prompt, vocab_size: int) -> Grammar | None:
        """What the answer must look like."""
        field = "tools" if body.schema_wanted is None else "response_format"
        if body.schema_wanted is None and not (prompt.tools and body.calls_constrained):
            return None
        if self._compiler is None:
            literal = self._tokenizer.thought_tag_ids | self._tokenizer.call_tag_ids
            self._compiler = GrammarCompiler(self._tokenizer, vocab_size, self.eos_token_ids, literal)
        try:
            return self._compiler.compile(whole_lark(_answer_lark(body, prompt), prompt.thought))
        except ValueError as error:
            raise InvalidRequest(f"{field}: no grammar can be made of it ({error}): change the schema", field) from None

    def watcher(
        self, prompt: Prompt, stops: Iterable[str], hidden_ids: frozenset[int], min_tokens: int = 0
    ) -> ServedWatcher:
        """What reads one generation's tokens."""
        parsers: list[SpanParser] = []
        shown_ids: frozenset[int] = frozenset()
        if prompt.thought is not None:
            parsers.append(ReasoningParser(prompt.thought))
            shown_ids |= self._tokenizer.thought_tag_ids
        if prompt.tools:
            parsers.append(ToolParser(prompt.tool_format, prompt.tools))
            shown_ids |= self._tokenizer.call_tag_ids
        text = TextWatcher(self._tokenizer, stops, hidden_ids, min_tokens=min_tokens, shown_ids=shown_ids)
        return ServedWatcher(text, *parsers)

    def trace(self) -> TraceShaper:
        """What shapes the rounds of one answer."""
        return TraceShaper(self._tokenizer)

    def logprobs(self, request: Request, chat: bool) -> LogprobShaper:
        """What shapes one choice's log-probabilities."""
        if chat:
            return ChatLogprobs(self._tokenizer)
        return CompletionLogprobs(self._tokenizer, request.eos_token_ids | request.stop_token_ids)


def _answer_lark(body: Generation, prompt: Prompt) -> str:
    """Rules for the JSON wanted, or for the calls."""
    if body.schema_wanted is not None:
        return schema_lark(body.schema_wanted)
    tools = [tool for tool in prompt.tools if body.named_tool in (None, tool.name)]
    several = body.parallel_tool_calls is not False and body.named_tool is None
    return calls_lark(prompt.tool_format, tools, several, text=not body.call_demanded)


def _refuse_functions(message: dict[str, Any], where: str) -> None:
    """The forerunner of tools, which no model here has seen."""
    if isinstance(message, dict) and (message.get("role") == "function" or message.get("function_call")):
        raise InvalidRequest(
            f"{where}: function_call and the role function are not supported: use tool_calls and the role tool",
            where,
            "unsupported_parameter",
        )


def _has_tools(message: object) -> bool:
    return isinstance(message, dict) and (message.get("role") == "tool" or bool(message.get("tool_calls")))


def _named(error: ValueError) -> InvalidRequest:
    """The text room begins its messages with the field."""
    field, colon, _ = str(error).partition(":")
    return InvalidRequest(str(error), field if colon and " " not in field else "messages")
