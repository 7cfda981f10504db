"""Everything that can go wrong, in OpenAI's envelope: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

logger = logging.getLogger("ddtree.server")


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


def from_validation(error: ValidationError) -> InvalidRequest:
    """The first thing that pydantic objects to, named by its dotted path."""
    errors = error.errors(include_url=False)
    # A union reports every branch; the one that got furthest into the value says the most.
    first = max(errors, key=lambda e: len(e["loc"]))
    names = [str(part) for part in first["loc"] if not _is_union_branch(part)]
    param = ".".join(names) or None
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return InvalidRequest(f"{param}: {message}", param) if param else InvalidRequest(message, _field_of(first))
    return InvalidRequest(f"{param}: {message}, got {shown(first['input'])}", param)


def _field_of(error: dict) -> str | None:
    """The field that a whole body's fault is about: its message begins with the name."""
    word = error["msg"].removeprefix("Value error, ").partition(" ")[0].rstrip(":")
    return word if isinstance(error["input"], dict) and word in error["input"] else None


def _is_union_branch(part: object) -> bool:
    """Pydantic puts the branch of a union ("list[str]", "str") into the path; the wire has no such name."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def install(app: FastAPI) -> None:
    """Answer every exception with the envelope."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


async def _on_api_error(request: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(body_for(request.url.path, error), error.status, headers=error.headers)


def body_for(path: str, error: ApiError) -> dict:
    """The error as the route's API says it."""
    return anthropic_envelope(error.status, error.message) if path.startswith("/v1/messages") else error.body()


async def _on_http_exception(request: Request, error: HTTPException) -> JSONResponse:
    phrase = HTTPStatus(error.status_code).phrase
    message = f"{phrase}: {request.method} {request.url.path}"
    if error.status_code == 405 and error.headers and "Allow" in error.headers:
        message += f" (allowed: {error.headers['Allow']})"
    body = envelope(message, "invalid_request_error", code=phrase.lower().replace(" ", "_"))
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(envelope(f"internal error: {type(error).__name__}", "server_error"), 500)
