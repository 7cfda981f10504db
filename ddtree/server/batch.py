"""What passes between the worker and the handlers: facts about the engine, batches of requests, pieces of output."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ddtree.engine.request import Emission, Request
from ddtree.server.watch import Shown

if TYPE_CHECKING:
    from ddtree.server.metrics import Metrics

logger = logging.getLogger("ddtree.server")


@dataclass(frozen=True)
class Facts:
    """What the server must know of a warm engine."""

    max_context: int
    vocab_size: int
    default_tree_budget: int | str = 0  # "auto": chosen each round by cost
    max_tree_budget: int = 1024
    scoring: str | None = None  # how drafts are ranked where a request does not say: factorised or conditioned
    block_size: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    batch_invariant: bool = False  # whether tokens are computed alike whatever runs beside them
    memory: Callable[[], dict] = dict  # JSON for /stats
    cache_use: Callable[[], float] = float  # share of the running requests' context that is filled


@dataclass(frozen=True)
class Piece:
    """What one emission brought for one request of a batch, and what may be shown by now."""

    index: int  # which of the batch's requests
    emission: Emission
    shown: Shown = Shown()


class WorkerLike(Protocol):
    """What create_app needs of a worker."""

    state: str  # starting | ready | failed | stopped
    failure: str | None
    facts: Facts | None  # once ready
    num_running: int
    num_waiting: int
    metrics: Metrics

    async def submit(self, requests: Sequence[Request]) -> Batch: ...


@dataclass(eq=False)
class Batch:
    """Requests submitted together. Iterate for their pieces; close() aborts what still runs."""

    requests: Sequence[Request]
    on_close: Callable[[Batch], None] = lambda batch: None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    queue: asyncio.Queue = field(default_factory=asyncio.Queue)
    num_open: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = len(self.requests)
        self.accepted = self.loop.create_future()

    def post(self, item: Piece | Exception) -> None:
        """From any thread: hand an item to the client. A client whose loop is gone needs nothing any more."""
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:
            logger.debug("event loop closed before an emission reached its client")

    def settle(self, error: Exception | None = None) -> None:
        """From any thread: say whether the engine took the batch."""

        def settle() -> None:
            if self.accepted.done():
                return
            if error is None:
                self.accepted.set_result(None)
            else:
                self.accepted.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(settle)
        except RuntimeError:
            logger.debug("event loop closed before its request was taken")

    async def next(self) -> Piece | None:
        """The next piece; None when every request has ended. Raises what ended the batch as a whole."""
        if not self.num_open:
            return None
        # get() does not wait while the queue has something, nor does sending to a dead socket: let others run in
        # between, above all whoever notices that the client has left.
        await asyncio.sleep(0)
        item = await self.queue.get()
        if isinstance(item, Exception):
            self.num_open = 0
            raise item
        if item.emission.finish_reason:
            self.num_open -= 1
        return item

    def __aiter__(self) -> Batch:
        return self

    async def __anext__(self) -> Piece:
        piece = await self.next()
        if piece is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """Abort whatever has not ended. May be called at any time, also twice."""
        self.num_open = 0
        self.on_close(self)
