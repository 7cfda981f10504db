"""What a client may send. Types are strict: "16" is not 16, true is not 1, and null means left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ddtree.server.errors import shown

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_LOGPROBS = 20

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]


class Wire(BaseModel):
    """Strict types; unknown fields are kept so that they can be logged."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Wire):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


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
    return_token_ids: bool | None = None

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
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
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
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Generation):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens wanted beside each emitted one; None wants no log-probabilities."""
        return self.logprobs

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        # By hand: of a union, pydantic would report each element against each branch.
        if isinstance(value, str) or isinstance(value, list) and _alike(value):
            return value
        raise ValueError(f"must be a string, or a list of strings, of token ids or of lists of ids, got {shown(value)}")


def _alike(value: list) -> bool:
    """All strings, all ids, or all lists of ids."""
    kinds = {type(each) for each in value}
    if kinds == {list}:
        kinds = {type(each) for inner in value for each in inner}
        return kinds <= {int}
    return kinds <= {str} or kinds == {int}


class ChatRequest(Generation):
    """Body of /v1/chat/completions; the text room reads the messages and the thinking switch."""

    messages: list[dict[str, Any]]
    enable_thinking: bool | str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _tops_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} without logprobs: send logprobs: true as well")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens wanted beside each emitted one; None wants no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Wire):
    """Body of /tokenize: a prompt, or messages to render."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    enable_thinking: bool | str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Wire):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
