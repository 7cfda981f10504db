"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from ddtree.server.errors import shown
from ddtree.server.fields import MAX_LOGPROBS, ToolDefinition
from ddtree.server.generation import Generation


class ChatRequest(Generation):
    """Body of /v1/chat/completions; the text room reads the messages and the thinking switch."""

    messages: list[dict[str, Any]]
    enable_thinking: bool | str | None = None
    thinking_budget: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _tool_choice(cls, value: Any) -> Any:
        named = isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict)
        if value in (None, "none", "auto", "required") or named and isinstance(value["function"].get("name"), str):
            return value
        form = '{"type": "function", "function": {"name": …}}'
        raise ValueError(f'must be "none", "auto", "required" or {form}, got {shown(value)}')

    @model_validator(mode="after")
    def _choice_fits_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"tools: two functions are named {shown(twice)}: rename one")
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not names:
            raise ValueError(f"tool_choice is {shown(self.tool_choice)} without tools: send tools, or leave it out")
        if self.named_tool is not None and self.named_tool not in names:
            raise ValueError(f"tool_choice names {shown(self.named_tool)}, and tools has only {', '.join(names)}")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise ValueError(f"{name} and tool_choice {shown(self.tool_choice)} exclude each other: leave one out")
        if self.schema_wanted is not None:
            raise ValueError("response_format and a demanded tool call exclude each other: leave one out")
        return self

    @property
    def named_tool(self) -> str | None:
        """The function that must be called."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def call_demanded(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def calls_constrained(self) -> bool:
        """Whether a grammar must see to the calls: one is demanded, or several or inexact ones are forbidden."""
        strict = any(tool.function.strict for tool in self.tools or ())
        return self.call_demanded or self.parallel_tool_calls is False or strict

    @property
    def tools_told(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, as they came; none with tool_choice none."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @model_validator(mode="after")
    def _tops_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} without logprobs: send logprobs: true as well")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens wanted beside each emitted one; None wants no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
