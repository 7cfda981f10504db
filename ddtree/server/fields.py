"""The kinds of values that requests are made of. Types are strict: "16" is not 16, true is not 1, null means left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
