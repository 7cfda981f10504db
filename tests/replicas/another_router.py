"""Somebody else's router in Caddy's place, for the tests that go through the proxy; by hand, since none is a dependency.

    DDTREE_TEST_PROXY='vllm-router --host 127.0.0.1 --port {port} --worker-urls {worker}' \\
        pytest -p tests.replicas.through_proxy tests/server/test_answers.py

Routers take seconds to start, and a test's app lives for less: one router serves all apps of a run, its worker being a port that
leads to the app that is spoken to at the time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shlex
import subprocess
import threading

import httpx
import uvicorn

from ddtree.server.run import listen_on, url_of
from tests.server import fakes

COMMAND = os.environ.get("DDTREE_TEST_PROXY")
STARTING = (502, 503)  # what a router answers that has not found its worker yet


class Switch:
    """A port whose connections lead to the port of the app that was turned to last; those of others are ended."""

    def __init__(self) -> None:
        self.sock = listen_on("127.0.0.1", 0)
        self.port, self._open = None, set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(asyncio.start_server(self._carry, sock=self.sock), self._loop).result(10)

    def turn(self, port: int) -> None:
        if port != self.port:
            self.port = port
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)

    async def _end(self) -> None:
        for writer in self._open:
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        app_reader, app_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._open |= {writer, app_writer}
        await asyncio.gather(_pipe(reader, app_writer), _pipe(app_reader, writer))
        self._open -= {writer, app_writer}


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.close()


class Router:
    """The router that `COMMAND` starts, in front of a switch."""

    def __init__(self, port: int) -> None:
        """`port` of a first app, which has to answer before the router has started."""
        self.switch = Switch()
        self.switch.turn(port)
        with listen_on("127.0.0.1", 0) as free:
            self.url = url_of(free)
        parts = shlex.split(COMMAND.format(port=self.url.rpartition(":")[2], worker=url_of(self.switch.sock)))
        process = subprocess.Popen(parts, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(process.kill)
        fakes.wait_for(self._answers, timeout_s=300)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/v1/models", trust_env=False, timeout=5).status_code not in STARTING
        return False


router: Router | None = None
ports: dict[int, int] = {}  # an app's id -> the port it is served on


@contextlib.contextmanager
def routed(app):
    """The app behind the router; yields the router's URL. Speak to it after `turn_to(app)` alone."""
    with listen_on("127.0.0.1", 0) as sock:
        ports[id(app)] = sock.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            fakes.wait_for(lambda: server.started)
            turn_to(app)
            yield router.url
        finally:
            server.should_exit = True
            thread.join(5)


def turn_to(app) -> None:
    global router
    if router is None:
        router = Router(ports[id(app)])
    router.switch.turn(ports[id(app)])
