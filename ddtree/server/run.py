"""Listen on a socket until a signal or a failed start ends it; then end everything in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from ddtree.service.notify import Notifier

if TYPE_CHECKING:  # the supervisor of replicas listens as well, and holds no engine
    from ddtree.server.worker import Worker

logger = logging.getLogger("ddtree.server")

TOLD_S = 9  # what clients that were told that the server ends get to hear it


def listen_on(host: str, port: int) -> socket.socket:
    """A bound socket; ValueError with the remedy where it cannot be had."""
    sock = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # A bound port can still be someone else's until it is listened on.
        sock.listen()
    except OSError as error:
        if sock is not None:
            sock.close()
        reason = {
            errno.EADDRINUSE: "the port is in use: choose another --port, or end what listens there",
            errno.EACCES: "not permitted: choose a --port above 1023",
            errno.EADDRNOTAVAIL: "this machine has no such address: choose another --host",
        }.get(error.errno, error.strerror or str(error))
        raise ValueError(f"cannot listen on {host}:{port}: {reason}") from None
    return sock


def listen_on_unix(path: str) -> socket.socket:
    """A bound Unix socket, in the place of one that nobody listens on any more; ValueError where it cannot be had."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            if sock.connect_ex(path) == 0:
                raise OSError(errno.EADDRINUSE, "another server listens there")
            os.unlink(path)
            sock.close()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(path)
        sock.listen()
    except OSError as error:
        sock.close()
        raise ValueError(f"cannot listen on {path}: {error.strerror or error}: choose another --uds") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Where clients find the socket; of a Unix socket its path."""
    if sock.family == socket.AF_UNIX:
        return sock.getsockname()
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, but a signal is not raised again at the end, so that what comes after run() still happens."""

    def __init__(self, config: uvicorn.Config, worker: Worker, drain_s: float):
        super().__init__(config)
        self._worker, self._drain_s = worker, drain_s
        self._notifier = Notifier()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second, in the loop that answers requests: systemd hears that it turns, and that the engine lives."""
        if self._worker.state == "ready":
            self._notifier.ready()
        if self._worker.state in ("starting", "ready"):
            self._notifier.beat()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server gently, a second Ctrl-C at once."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
            self._worker.end()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what runs finish for the drain; then its clients get an error, which closes their connections."""
        self._notifier.stopping()
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._worker.end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def run(app: ASGIApp, worker: Worker, sock: socket.socket, drain_s: float = 3.0) -> None:
    """Serve until told to end, then let requests finish for `drain_s`. Returns with the worker stopped; a failed load re-raises here."""
    patience_s = int(drain_s) + TOLD_S
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=patience_s, lifespan="on")
    server = Server(config, worker, drain_s)

    def load_failed() -> None:
        server.should_exit = True

    worker.on_load_failure = load_failed
    try:
        # From here on: uvicorn begins later, and until then Ctrl-C would be an exception in the middle of its and asyncio's start.
        with server.capture_signals():
            worker.start()
            server.run(sockets=[sock])
    finally:
        worker.stop()
        sock.close()
    if worker.facts is None and worker.error is not None:
        raise worker.error
