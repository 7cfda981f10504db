"""Request bodies: read within a size limit, parsed as strict JSON, checked against a model of its route."""

from __future__ import annotations

import json
import logging
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from ddtree.server.errors import BodyTooLarge, ClientGone, InvalidRequest, NotJson, shown
from ddtree.server.faults import from_validation
from ddtree.server.fields import Wire
from ddtree.server.refusals import Table, refuse_unsupported

logger = logging.getLogger("ddtree.server")
Body = TypeVar("Body", bound=Wire)


async def read(request: Request, model: type[Body], limit_bytes: int, refused: Table) -> Body:
    """The body as a `model`; raises ApiError with the field at fault."""
    _check_content_type(request.headers.get("content-type"))
    parsed = parse_json(await _read_bytes(request, limit_bytes))
    refuse_unsupported(parsed, refused)
    try:
        body = model.model_validate(parsed)
    except ValidationError as error:
        raise from_validation(error) from None
    unknown = set(body.model_extra or ()) - set(refused)
    if unknown:
        logger.debug("fields without effect here: %s", ", ".join(sorted(map(shown, unknown))))
    return body


def _check_content_type(declared: str | None) -> None:
    """JSON or unsaid. Browsers send other types across origins without asking the server first."""
    kind = (declared or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise NotJson(
            f"content-type must be application/json, got {shown(declared)}: set the header", code="unsupported_media_type"
        )


def parse_json(raw: bytes) -> dict:
    """A JSON object of well-formed text and finite numbers."""
    try:
        parsed = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\ud" in raw.lower():
            # An escaped half of a surrogate pair parses, but is no text and breaks the tokenizer far from here.
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 text: {error.reason}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {shown(parsed)}", code="invalid_json")
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


async def _read_bytes(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit_bytes} bytes: send less", code="body_too_large")
