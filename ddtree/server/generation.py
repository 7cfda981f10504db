"""What every generation may ask for, whichever API it came by."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ddtree.server.errors import shown
from ddtree.server.fields import Penalty, Probability, ResponseFormat, StreamOptions, TokenId, Wire

MAX_CHOICES = 128
MAX_STOPS = 64


class Generation(Wire):
    """The fields that chat and completions share. Defaults are OpenAI's, max_tokens apart: omitted, it is the room left."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tree_budget: int | str | None = None
    scoring: Literal["factorised", "conditioned"] | None = None
    return_token_ids: bool | None = None
    ddtree_trace: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    response_format: ResponseFormat | None = None

    @field_validator("tree_budget", mode="before")
    @classmethod
    def _budget(cls, value: Any) -> Any:
        if value is None or value == "auto":
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f'must be an integer >= 0 or "auto", got {shown(value)}')
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias(cls, value: Any) -> Any:
        """Token ids are JSON keys, so strings; an empty list is how some clients write "none"."""
        if not value and value in (None, [], {}):
            return None
        if not isinstance(value, dict):
            raise ValueError(f"must be an object of token ids and numbers, got {shown(value)}")
        for token_id, bias in value.items():
            if not token_id.isascii() or not token_id.isdecimal():
                raise ValueError(f"keys are token ids, got {shown(token_id)}")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise ValueError(f"a bias is a number in -100 ... 100, got {shown(bias)} for token {token_id}")
        return value

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if "" in stops:
            raise ValueError('an empty string stops before the first token, got "": leave it out')
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, got {len(stops)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Generation:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(f"max_tokens is {both[0]} and max_completion_tokens is {both[1]}: give one of them")
        if self.min_tokens and self.token_limit is not None and self.min_tokens > self.token_limit:
            raise ValueError(f"min_tokens is {self.min_tokens} and max_tokens {self.token_limit}: lower min_tokens")
        if self.schema_wanted is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ValueError(f"{name} and response_format exclude each other: the text ends where the JSON does")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        if self.ddtree_trace and not self.stream:
            raise ValueError("ddtree_trace is true and stream is not: a trace comes round by round, send stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, one or many."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        """max_tokens under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def schema_wanted(self) -> dict[str, Any] | bool | None:
        """The JSON Schema that the answer must follow; None for text."""
        return self.response_format.schema_wanted if self.response_format else None

    @property
    def prefix_salt(self) -> str | None:
        """Whose prefixes are shared (the engine's `cache_salt`); None where none are to be."""
        return None if self.cache_prompt is False else self.cache_salt or ""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


# What /v1/responses and /v1/messages hand on to a chat request as it is.
CARRIED = (set(Generation.model_fields) | {"enable_thinking", "thinking_budget", "chat_template_kwargs", "parallel_tool_calls"}) - {
    "model",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stream",
    "stream_options",
    "return_token_ids",
    "ddtree_trace",
    "response_format",
}
