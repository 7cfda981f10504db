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


class JsonSchemaFormat(Wire):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = True
    strict: bool | None = None


class ResponseFormat(Wire):
    """`response_format`: text, any JSON object, or JSON that a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with type json_schema, and with no other")
        return self

    @property
    def schema_wanted(self) -> dict[str, Any] | bool | None:
        """The JSON Schema that the answer must follow; None for text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class FunctionDefinition(Wire):
    """`tools[].function`; `parameters` is a JSON Schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Wire):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


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
    ddtree_trace: bool | None = None
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
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Wire):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


# What /v1/responses and /v1/messages hand on to a chat request as it is.
CARRIED = (set(Generation.model_fields) | {"enable_thinking", "chat_template_kwargs", "parallel_tool_calls"}) - {
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
