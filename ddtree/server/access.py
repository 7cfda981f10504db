"""A line for every request, and an id that client, log and answer share."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("ddtree.requests")

_SAFE_ID = re.compile(rb"[\w.:-]{1,128}")
MAX_LOGGED_BYTES = 8192  # of a body, where bodies are asked for


class Access:
    """Plain ASGI. The id is the client's `X-Request-Id`, or drawn. What was said is logged only where `bodies` asks for it."""

    def __init__(self, app: ASGIApp, bodies: bool = False):
        self._app, self._bodies = app, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if _SAFE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}".encode()
        started, status, body = time.monotonic(), 0, b""

        async def watched_receive() -> Message:
            nonlocal body
            message = await receive()
            if self._bodies and len(body) < MAX_LOGGED_BYTES:
                body += message.get("body", b"")
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            fields = {
                "request_id": request_id.decode(),
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "duration_s": round(time.monotonic() - started, 4),
            }
            if self._bodies:
                fields["body"] = body[:MAX_LOGGED_BYTES].decode(errors="replace")
            text = "{method} {path} {status} in {duration_s} s, {request_id}".format(**fields)
            logger.info("%s", text, extra={"fields": fields})
