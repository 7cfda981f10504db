"""Faults on their way out: what pydantic objects to in our words, and every exception as an answer."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ddtree.server.errors import ApiError, InvalidRequest, body_for, envelope, shown

logger = logging.getLogger("ddtree.server")


# Pydantic's kinds of error in our words; `{...}` comes from the error's context.
WORDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of a usual size",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "string_pattern_mismatch": "a string that matches {pattern}",
}


def from_validation(error: ValidationError) -> InvalidRequest:
    """The first thing that pydantic objects to, named by its path: `tools[0].function.name`."""
    errors = error.errors(include_url=False)
    # A union reports every branch; the one that got furthest into the value says the most.
    depth = max(len(_names(each)) for each in errors)
    deepest = [each for each in errors if len(_names(each)) == depth]
    first = deepest[0]
    param = _path(_names(first))
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param, "missing_required_parameter")
    if first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        return InvalidRequest(f"{param}: {message}", param) if param else InvalidRequest(message, _field_of(message))
    wanted = dict.fromkeys(_wanted(each) for each in deepest if _names(each) == _names(first))
    return InvalidRequest(f"{param}: must be {' or '.join(wanted)}, got {shown(first['input'])}", param)


def _names(error: dict) -> list[str | int]:
    return [part for part in error["loc"] if not _is_union_branch(part)]


def _path(names: list[str | int]) -> str | None:
    text = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    return text.removeprefix(".") or None


def _wanted(error: dict) -> str:
    words = WORDS.get(error["type"])
    return words.format(**error.get("ctx", {})) if words else error["msg"].removeprefix("Input should be ")


def _field_of(message: str) -> str | None:
    """The field that a whole body's fault is about: its message begins with the name."""
    word = message.partition(" ")[0].rstrip(":")
    return word if word.replace("_", "").isalpha() and word.islower() else None


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
