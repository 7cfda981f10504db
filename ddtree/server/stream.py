"""Server-sent events: the answer in chunks, comments while nothing happens, an end as soon as the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ddtree.server.batch import Batch, Piece
from ddtree.server.choices import Choice
from ddtree.server.errors import ApiError, EngineFailed
from ddtree.server.sse import KEEP_ALIVE

logger = logging.getLogger("ddtree.server")


class WireShape(Protocol):
    """How one API says an answer: whole, or as events."""

    def response(self, choices: Sequence[Choice]) -> dict: ...

    def begin(self, choices: Sequence[Choice]) -> list[bytes]: ...

    def step(self, piece: Piece, choices: Sequence[Choice]) -> list[bytes]:
        """The events of a piece that its choice has already taken in."""
        ...

    def end(self, choices: Sequence[Choice]) -> list[bytes]: ...

    def fault(self, error: ApiError) -> list[bytes]:
        """The end, when something failed on the way."""
        ...


class EventStream(Response):
    """Sends events until they end or the client leaves, whichever comes first.

    Starlette's StreamingResponse leaves the second to the server's ASGI version, and notices nothing while there is
    nothing to send; here a request in a long prefill is dropped at once as well.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], batch: Batch):
        self.status_code = 200
        self.background = None
        self._events, self._batch = events, batch
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send(send))
        leaver = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({sender, leaver}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, leaver):
                task.cancel()
            results = await asyncio.gather(sender, leaver, return_exceptions=True)
            self._batch.close()
        if isinstance(results[0], OSError):
            logger.debug("client left while a chunk was on its way")
        elif isinstance(results[0], Exception):
            raise results[0]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def events(batch: Batch, wire: WireShape, keep_alive_s: float) -> AsyncIterator[bytes]:
    """The chunks of an answer. A fault on the way is one event, and the end."""
    choices = [Choice(index) for index in range(len(batch.requests))]
    try:
        for each in wire.begin(choices):
            yield each
        async for piece in _with_pauses(batch, keep_alive_s):
            if piece is None:
                yield KEEP_ALIVE
                continue
            choices[piece.index].add(piece)
            for each in wire.step(piece, choices):
                yield each
        for each in wire.end(choices):
            yield each
    except ApiError as error:
        for each in wire.fault(error):
            yield each
    except Exception as error:
        logger.exception("a stream failed")
        for each in wire.fault(EngineFailed(f"internal error: {type(error).__name__}")):
            yield each


async def _with_pauses(batch: Batch, pause_s: float) -> AsyncIterator[Piece | None]:
    """The batch's pieces, and None whenever `pause_s` went by without one."""
    while True:
        try:
            async with asyncio.timeout(pause_s):
                piece = await batch.next()
        except TimeoutError:
            yield None
            continue
        if piece is None:
            return
        yield piece
