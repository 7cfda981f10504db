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
