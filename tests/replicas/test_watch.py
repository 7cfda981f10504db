"""What the supervisor does about replicas that are ill without having died, or that cannot start. The replicas are a few lines each."""

import asyncio
import logging
import os
import signal
import sys
import threading
import time

import httpx
import pytest

from ddtree.replicas import supervisor as supervisors
from ddtree.replicas.launch import Launch
from ddtree.replicas.supervisor import Supervisor
from ddtree.server.run import listen_on, url_of
from tests.server.fakes import wait_for

# argv: the socket, and a file whose text decides what /health says; "mute" says nothing.
REPLICA = """
import http.server, pathlib, socketserver, sys, time
path, mood = sys.argv[1], pathlib.Path(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = mood.read_text()
        if text == "mute":
            time.sleep(60)
        self.send_response(200 if text == "well" else 503)
        self.end_headers()
        self.wfile.write(('{"error": {"code": "%s"}}' % text).encode())
    def address_string(self):
        return ""
    def log_message(self, *args):
        pass
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
Server(path, Handler).serve_forever()
"""


class Running:
    """A supervisor over two such replicas, its loop in a thread."""

    def __init__(self, folder, script=REPLICA):
        self.sock = listen_on("127.0.0.1", 0)
        self.url = url_of(self.sock)
        self.moods = [folder / "mood-0", folder / "mood-1"]
        launches = []
        for index, mood in enumerate(self.moods):
            mood.write_text("well")
            socket = folder / f"{index}.sock"
            command = (sys.executable, "-S", "-c", script, str(socket), str(mood))
            launches.append(Launch(command, {"PATH": os.environ["PATH"]}, socket, "here"))
        self.supervisor = Supervisor(launches, self.sock, self.url, folder, drain_s=0)
        self.error = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        async def run():
            self.loop = asyncio.get_running_loop()
            await self.supervisor.run()

        try:
            asyncio.run(run())
        except ValueError as error:
            self.error = error

    def health(self) -> httpx.Response | None:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=10)
        except httpx.TransportError:
            return None

    def wait_until(self, status) -> None:
        wait_for(lambda: (got := self.health()) is not None and got.json().get("status") == status, timeout_s=40)

    def end(self):
        self.loop.call_soon_threadsafe(self.supervisor.stop)
        self.thread.join(30)
        self.sock.close()
        assert not self.thread.is_alive()


@pytest.fixture
def running(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisors, "CHECK_S", 0.1)
    monkeypatch.setattr(supervisors, "HUNG_S", 1.0)
    monkeypatch.setattr(supervisors, "ASK_S", 0.5)
    running = Running(tmp_path)
    running.wait_until("ok")
    yield running
    running.end()


@pytest.mark.parametrize(
    ("mood", "says"),
    [("engine_dead", "the engine of replica 1 is dead"), ("mute", "has not been well"), ("engine_stuck", "has not been well")],
)
def test_a_replica_that_is_ill_is_ended_and_started_again(running, caplog, mood, says):
    first = running.supervisor.replicas[1].pid
    with caplog.at_level(logging.INFO):
        running.moods[1].write_text(mood)
        running.wait_until("degraded")
        assert running.health().json()["replicas"]["not_ready"] == [1]
        wait_for(lambda: running.supervisor.replicas[1].restarts == 1, timeout_s=20)
        running.moods[1].write_text("well")
        running.wait_until("ok")
    assert says in caplog.text and running.supervisor.replicas[1].pid != first
    assert running.supervisor.replicas[0].restarts == 0


def test_a_moment_of_weakness_is_no_death(running):
    running.moods[0].write_text("stopping")
    running.wait_until("degraded")
    running.moods[0].write_text("well")
    running.wait_until("ok")
    assert running.supervisor.replicas[0].restarts == 0


def test_a_proxy_that_dies_is_started_again_and_the_port_stays(running):
    proxy = running.supervisor._proxy
    os.kill(proxy.pid, signal.SIGKILL)
    wait_for(lambda: running.supervisor._proxy is not proxy, timeout_s=20)
    running.wait_until("ok")


def test_health_is_503_until_all_have_been_ready(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisors, "CHECK_S", 0.1)
    slow = REPLICA.replace("Server(path", "time.sleep(2 if path.endswith('1.sock') else 0); Server(path")
    running = Running(tmp_path, slow)
    try:
        wait_for(lambda: (got := running.health()) is not None and got.json()["replicas"]["ready"] == 1, timeout_s=20)
        early = running.health()
        assert early.status_code == 503 and early.json()["error"]["code"] == "starting"
        assert early.headers["retry-after"] == "2" and early.json()["replicas"]["not_ready"] == [1]
        running.wait_until("ok")
    finally:
        running.end()


def test_a_replica_that_cannot_start_as_asked_ends_it_all(tmp_path):
    started = time.monotonic()
    running = Running(tmp_path, "import sys; sys.exit(2)")
    running.thread.join(30)
    running.sock.close()
    assert "could not be started" in str(running.error) and time.monotonic() - started < 30
