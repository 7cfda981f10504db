"""A pytest plugin: the clients of tests/server speak to their app through Caddy, as replicas are spoken to.

    pytest -p tests.replicas.through_proxy tests/server/test_answers.py

or through another router: `another_router.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn

from ddtree.replicas.proxy import ProxyPlan, configuration, find_caddy
from ddtree.server.run import listen_on, listen_on_unix, url_of
from tests.replicas import another_router
from tests.server import fakes, live


@contextlib.contextmanager
def proxied(app):
    """The app behind Caddy, configured as for one replica; yields the URL."""
    if another_router.COMMAND:
        with another_router.routed(app) as url:
            yield url
        return
    with tempfile.TemporaryDirectory() as folder, listen_on("127.0.0.1", 0) as sock:
        path = Path(folder) / "app.sock"
        # Both routes lead to the app: what the supervisor adds is tested elsewhere.
        plan = ProxyPlan(f"fd/{sock.fileno()}", [path], path, Path(folder), drain_s=0)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        unix = listen_on_unix(str(path))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [unix]}, daemon=True)
        thread.start()
        caddy = subprocess.Popen(
            [find_caddy(), "run", "--config", "-"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[sock.fileno()],
            env={"HOME": folder},
        )
        caddy.stdin.write(json.dumps(configuration(plan)).encode())
        caddy.stdin.close()
        try:
            fakes.wait_for(lambda: server.started)
            yield url_of(sock)
        finally:
            server.should_exit = True
            caddy.kill()
            caddy.wait()
            thread.join(5)
            unix.close()


@pytest.fixture(scope="module", autouse=True)
def _through_proxy():
    """Every request of a fakes.Client goes over the proxy, which is started at the first and ends with the module."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        urls = {}

        def request(self, method, path, **options):
            if self not in urls:
                urls[self] = stack.enter_context(proxied(self.app))
            if another_router.COMMAND:
                another_router.turn_to(self.app)

            async def go():
                async with httpx.AsyncClient(base_url=urls[self], trust_env=False, timeout=30) as client:
                    return await client.request(method, path, **options)

            return asyncio.run(go())

        patch.setattr(fakes.Client, "request", request)
        patch.setattr(live, "live", proxied)
        yield
