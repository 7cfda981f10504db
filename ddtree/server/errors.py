"""Everything that can go wrong, in OpenAI's envelope: {"error": {message, type, param, code}}. Needs no web framework."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

Names = Sequence[tuple[str, str]]  # regular expressions of our names, and what an API calls them



class ApiError(Exception):
    """A fault that the client is told about, with the status it is told with."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        return {}

    def body(self) -> dict:
        """The envelope."""
        return envelope(self.message, self.type, self.param, self.code)


class InvalidRequest(ApiError):
    """The request itself is at fault; the message names the field, the value and the remedy."""


class BodyTooLarge(ApiError):
    """The body is larger than the server reads."""

    status = 413


class NotJson(ApiError):
    """The body is declared to be something else than JSON."""

    status = 415


class Unauthorized(ApiError):
    """A missing or wrong API key."""

    status = 401
    type = "authentication_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class ModelNotFound(ApiError):
    """No model of that name at /v1/models/{id}."""

    status = 404


class Overloaded(ApiError):
    """The queue is full."""

    status = 429
    type = "rate_limit_error"
    retry_after_s = 1

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class Unavailable(ApiError):
    """The engine is not there: still starting, stopped, or dead."""

    status = 503
    type = "service_unavailable_error"

    def __init__(self, message: str, code: str | None = None, retry_after_s: int | None = None):
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class EngineFailed(ApiError):
    """The engine failed while this request ran."""

    status = 500
    type = "server_error"


class ClientGone(ApiError):
    """The client left; nobody reads the answer, the status is for the log alone."""

    status = 499

    def __init__(self) -> None:
        super().__init__("client closed the connection")


def envelope(message: str, type: str, param: str | None = None, code: str | None = None) -> dict:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


@contextmanager
def said_as(names: Names) -> Iterator[None]:
    """Name fields as the client's API does: what is refused inside is told in its words."""
    try:
        yield
    except InvalidRequest as error:
        message, param = error.message, error.param
        for name, theirs in names:
            message = re.sub(name, theirs, message)
            param = None if param is None else re.sub(name, theirs, param)
        raise InvalidRequest(message, param, error.code) from None


# By status; the other 4xx are requests at fault.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_envelope(status: int, message: str) -> dict:
    """Anthropic's error object, for /v1/messages."""
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def shown(value: object, limit: int = 80) -> str:
    """A value as a message shows it: JSON-like and short."""
    text = repr(value)
    text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def body_for(path: str, error: ApiError) -> dict:
    """The error as the route's API says it."""
    return anthropic_envelope(error.status, error.message) if path.startswith("/v1/messages") else error.body()
