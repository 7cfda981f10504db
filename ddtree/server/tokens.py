"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from ddtree.server.fields import TokenId, ToolDefinition, Wire


class TokenizeRequest(Wire):
    """Body of /tokenize: a prompt, or messages to render."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    enable_thinking: bool | str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    tools: list[ToolDefinition] | None = None

    @property
    def tools_told(self) -> list[dict[str, Any]]:
        """As ChatRequest's."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeRequest(Wire):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
