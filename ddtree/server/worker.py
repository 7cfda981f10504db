"""The engine's thread: requests go in through an inbox, what they emit comes back to each client's event loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ddtree.engine.request import Emission, Request
from ddtree.server.batch import Batch, Facts, Piece, WorkerLike
from ddtree.server.errors import EngineFailed, InvalidRequest, Overloaded, Unavailable
from ddtree.server.metrics import Metrics
from ddtree.server.watch import ServedWatcher, Shown

logger = logging.getLogger("ddtree.server")

# A fault that step() itself raises is nobody's in particular. A few may be bad luck (memory); a row of them is a
# broken engine, and a dead thread that says so serves better than one that fails every request.
MAX_FAULTS_IN_A_ROW = 3
# A chunk or a round of the largest model on the slowest machine takes seconds. A thread that has not come back for so long
# hangs; Python cannot end it, but whoever asks is told, and a supervisor can restart the process.
STUCK_AFTER_S = 300.0


class EngineLike(Protocol):
    """What the worker needs of an engine; see engine.engine.Engine."""

    has_work: bool
    num_running: int
    num_waiting: int

    def add(self, request: Request) -> int: ...

    def abort(self, request_id: int) -> None: ...

    def step(self) -> list[Emission]: ...

    def prepare_one(self) -> bool: ...


class Worker:
    """Owns the engine's thread. `load` runs in it: the server listens and answers 503 until it is done."""

    def __init__(
        self, load: Callable[[], tuple[EngineLike, Facts]], max_waiting: int = 128, metrics: Metrics | None = None
    ):
        self._load = load
        self.on_load_failure: Callable[[], None] = lambda: None  # called in the thread
        self.max_waiting = max_waiting
        self.metrics = metrics or Metrics()
        self._state = "starting"
        self.stuck_after_s = STUCK_AFTER_S
        self._step_began: float | None = None  # of the step at hand
        self.failure: str | None = None
        self.error: BaseException | None = None
        self.facts: Facts | None = None
        self._engine: EngineLike | None = None
        self._inbox: deque[tuple[str, Batch]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._faults_in_a_row = 0
        self._preparing = True  # while nobody asks, until nothing is left
        self._num_submitted = 0  # in the inbox, not yet the engine's
        self._counts = (0, 0)  # the engine's running and waiting, as of the last step
        self._live: dict[int, tuple[Batch, int]] = {}  # request id -> its batch and place in it
        self._thread = threading.Thread(target=self._run, name="ddtree-engine", daemon=True)

    def start(self) -> Worker:
        """Start the thread, which loads the engine first."""
        self._thread.start()
        return self

    def end(self) -> None:
        """Ask the thread to end after the step at hand; what still runs is told so."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def stop(self, timeout_s: float = 10.0) -> None:
        """end(), and wait for it."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def state(self) -> str:
        """starting | ready | stuck (one engine step takes too long; ready again should it end) | failed | stopped"""
        began = self._step_began
        stuck = self._state == "ready" and began is not None and time.monotonic() - began > self.stuck_after_s
        return "stuck" if stuck else self._state

    @property
    def num_running(self) -> int:
        return self._counts[0]

    @property
    def num_waiting(self) -> int:
        return self._num_submitted + self._counts[1]

    async def submit(self, requests: Sequence[Request]) -> Batch:
        """Queue requests, all or none. Raises Overloaded, Unavailable, or InvalidRequest if the engine refuses one."""
        with self._wake:
            if self.state != "ready":
                raise unavailable(self)
            if self.num_waiting >= self.max_waiting:
                raise Overloaded(
                    f"{self.num_waiting} requests are waiting, the limit is {self.max_waiting}: try again later",
                    code="queue_full",
                )
            batch = Batch(requests, self._close)
            self._num_submitted += len(requests)
            self._inbox.append(("add", batch))
            self._wake.notify()
        try:
            await batch.accepted
        except BaseException:
            batch.close()
            raise
        return batch

    def _close(self, batch: Batch) -> None:
        with self._wake:
            if self._state == "ready":
                self._inbox.append(("abort", batch))
                self._wake.notify()

    # ---- below: the engine's thread alone ----

    def _run(self) -> None:
        try:
            self._engine, self.facts = self._load()
            with self._wake:
                self._state = "ready"
            while self._serve_once():
                pass
            self._end("stopped", "the server is shutting down")
        except BaseException as error:
            self.error = error
            self._end("failed", f"{type(error).__name__}: {error}")
            if self.facts is None:
                self.on_load_failure()
            else:
                logger.error("the engine thread died; requests are refused until a restart", exc_info=error)

    def _serve_once(self) -> bool:
        """Take what came in, then one engine step. False when asked to stop."""
        with self._wake:
            while not (self._inbox or self._stopping or self._engine.has_work or self._preparing):
                self._wake.wait()
            if self._stopping:
                return False
        while self._inbox:
            # Stays in the inbox until obeyed, so that _end() finds it should the thread die in between.
            verb, batch = self._inbox[0]
            self._obey(verb, batch)
            self._inbox.popleft()
            self._publish(num_added=len(batch.requests) if verb == "add" else 0)
        if self._engine.has_work:
            self._step()
            self._publish()
        elif self._preparing:
            self._prepare()
        return True

    def _prepare(self) -> None:
        """One thing of those that requests would wait for; watched as a step is."""
        self._step_began = time.monotonic()
        try:
            self._preparing = self._engine.prepare_one()
        except Exception:
            self._preparing = False
            logger.exception("something could not be prepared while the server was idle; who needs it will wait for it")
        finally:
            self._step_began = None

    def _publish(self, num_added: int = 0) -> None:
        with self._wake:
            self._num_submitted -= num_added
            self._counts = (self._engine.num_running, self._engine.num_waiting)

    def _obey(self, verb: str, batch: Batch) -> None:
        """Carry out one command."""
        if verb == "abort":
            self._abort(batch)
            return
        try:
            for index, request in enumerate(batch.requests):
                request_id = self._engine.add(request)
                self._live[request_id] = (batch, index)
                self.metrics.began(request_id, request)
        except ValueError as error:
            self._abort(batch)
            batch.settle(InvalidRequest(str(error)))
        except Exception as error:
            logger.exception("the engine could not take a request")
            self._abort(batch)
            batch.settle(EngineFailed(f"{type(error).__name__}: {error}"))
        else:
            batch.settle()

    def _abort(self, batch: Batch) -> None:
        for request_id in [rid for rid, (owner, _) in self._live.items() if owner is batch]:
            del self._live[request_id]
            self._engine.abort(request_id)
            self.metrics.ended(request_id, "abort")

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            emissions = self._engine.step()
        except Exception as error:
            self._faults_in_a_row += 1
            if self._faults_in_a_row >= MAX_FAULTS_IN_A_ROW:
                raise
            logger.exception("an engine step failed; its requests end here")
            self._fail_all(EngineFailed(f"the engine failed: {type(error).__name__}: {error}"))
            return
        finally:
            self._step_began = None
        self._faults_in_a_row = 0
        for emission in emissions:
            self._deliver(emission)

    def _deliver(self, emission: Emission) -> None:
        owner = self._live.get(emission.request_id)
        if owner is None:
            return
        batch, index = owner
        grammar = batch.requests[index].grammar
        if grammar is not None and grammar.error and emission.finish_reason:
            # From the fault on only an end was allowed: not an answer to pass on as one.
            emission = replace(emission, finish_reason="error", error=f"the grammar failed: {grammar.error}")
        self.metrics.emitted(emission)
        if emission.finish_reason:
            del self._live[emission.request_id]
        batch.post(Piece(index, emission, _shown(batch.requests[index], emission)))

    def _fail_all(self, error: Exception) -> None:
        for request_id, (batch, _) in list(self._live.items()):
            batch.post(error)
            self._engine.abort(request_id)
            self.metrics.ended(request_id, "error")
        self._live.clear()

    def _end(self, state: str, failure: str) -> None:
        """Tell everyone who waits that nothing more comes."""
        with self._wake:
            self._state, self.failure = state, failure
            waiting = [batch for verb, batch in self._inbox if verb == "add"]
            self._inbox.clear()
            self._num_submitted, self._counts = 0, (0, 0)
        for batch in waiting:
            batch.settle(unavailable(self))
        for batch in {batch for batch, _ in self._live.values()}:
            batch.post(unavailable(self))
        self._live.clear()


def unavailable(worker: WorkerLike) -> Unavailable:
    """Why the worker takes no request now."""
    if worker.state == "starting":
        return Unavailable("the model is still loading: try again shortly", code="starting", retry_after_s=2)
    if worker.state == "stopped":
        return Unavailable("the server is shutting down", code="stopping")
    if worker.state == "stuck":
        return Unavailable("the engine has not finished a step for minutes: restart the server", code="engine_stuck")
    return Unavailable(f"the engine is dead ({worker.failure}): restart the server", code="engine_dead")


def _shown(request: Request, emission: Emission) -> Shown:
    """What the watcher has ready. Read here, since the engine's thread is the one that feeds it."""
    if not isinstance(request.watcher, ServedWatcher):
        return Shown()
    return request.watcher.take(last=emission.finish_reason is not None)
