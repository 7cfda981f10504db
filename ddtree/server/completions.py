"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from ddtree.server.errors import shown
from ddtree.server.fields import MAX_LOGPROBS
from ddtree.server.generation import Generation


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
