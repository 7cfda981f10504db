"""A server on a real socket, for clients that bring their own HTTP."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import uvicorn

from ddtree.server.run import listen_on, url_of
from tests.server.fakes import wait_for


@contextmanager
def live(app):
    """The app on a free port of this machine; yields its URL."""
    sock = listen_on("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()
