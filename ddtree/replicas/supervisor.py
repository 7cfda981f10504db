"""Starts the replicas and the proxy, starts again what dies, and ends all of it in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from ddtree.replicas.admin import admin_app
from ddtree.replicas.ask import ask
from ddtree.replicas.launch import Launch, Replica, spawn
from ddtree.replicas.proxy import ProxyPlan, configuration, find_caddy
from ddtree.service.notify import Notifier

logger = logging.getLogger("ddtree.replicas")

CHECK_S, ASK_S = 1.0, 5.0  # between looks at a replica's /health; how long an answer may take
HUNG_S = 60.0  # a replica that was ready and whose /health has not said so for so long is ended by force
SETTLED_S = 60.0  # a replica that lived so long is started again at once
LONGEST_DELAY_S = 60.0
TOLD_S = 10.0  # what replicas get to end after they were told
BAD_CONFIGURATION = 2  # the exit status of a command that the user has to change


class Supervisor:
    """`run()` serves until a signal. The socket is bound and listens already."""

    def __init__(self, launches: Sequence[Launch], sock: socket.socket, url: str, folder: Path, drain_s: float):
        self._sock, self._url, self._folder, self._drain_s = sock, url, folder, drain_s
        self.replicas = [Replica(index, launch) for index, launch in enumerate(launches)]
        self._caddy = find_caddy()
        self._notifier = Notifier()
        self._proxy: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._warm = False
        self._failure: str | None = None

    async def run(self) -> None:
        """Serve. ValueError where a replica says that it cannot be started as asked."""
        if threading.current_thread() is threading.main_thread():
            for sig in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(sig, self._on_signal, sig)
        admin = self._start_admin()
        keepers = [asyncio.create_task(self._keep(each)) for each in self.replicas]
        keepers += [asyncio.create_task(self._keep_proxy()), asyncio.create_task(self._report())]
        try:
            await self._stop.wait()
        finally:
            await self._end(keepers)
            admin.should_exit = True
        if self._failure is not None:
            raise ValueError(self._failure)

    def stop(self) -> None:
        """End in order; to be called in the loop."""
        self._stop.set()

    def _on_signal(self, sig: int) -> None:
        if self._stop.is_set() and sig == signal.SIGINT:
            self._hurry.set()
        self.stop()

    def _start_admin(self) -> uvicorn.Server:
        app = admin_app(self.replicas, lambda: self._warm)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(self._admin_path))
        sock.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="ddtree-admin", daemon=True).start()
        return server

    @property
    def _admin_path(self) -> Path:
        return self._folder / "admin.sock"

    async def _keep(self, replica: Replica) -> None:
        """Start one replica, and again whenever it ends."""
        delay_s = 0.0
        while not self._stop.is_set():
            started = time.monotonic()
            replica.launch.socket.unlink(missing_ok=True)
            replica.process = await spawn(replica.launch.command, replica.launch.environment)
            replica.state, replica.last_well = "starting", started
            status = await self._watch(replica)
            if self._stop.is_set():
                return
            if status == BAD_CONFIGURATION and not replica.was_ready:
                self._failure = f"replica {replica.index} could not be started: see its message above"
                self._stop.set()
                return
            delay_s = 0.0 if time.monotonic() - started > SETTLED_S else min(max(2 * delay_s, 1.0), LONGEST_DELAY_S)
            replica.state, replica.restarts = "restarting", replica.restarts + 1
            logger.error("replica %d %s; starting it again in %g s", replica.index, _ended(status), delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay_s)

    async def _watch(self, replica: Replica) -> int:
        """Follow a replica's /health until its process ends; returns the exit status."""
        process = replica.process
        while True:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(process.wait(), CHECK_S)
            reply = await asyncio.to_thread(ask, replica.launch.socket, "/health", ASK_S)
            now = time.monotonic()
            if process.returncode is not None:
                continue
            if reply is not None and reply.status == 200:
                replica.last_well = now
                if replica.state != "ready":
                    logger.info("replica %d is ready on %s", replica.index, replica.launch.place)
                replica.state, replica.was_ready = "ready", True
            elif reply is not None and b'"engine_dead"' in reply.body:
                replica.state = "failing"
                logger.error("the engine of replica %d is dead; ending its process", replica.index)
                process.kill()
            elif replica.state == "ready":
                replica.state = "failing"
            elif replica.state == "failing" and now - replica.last_well > HUNG_S:
                logger.error("replica %d has not been well for %g s; ending it by force", replica.index, HUNG_S)
                process.kill()

    async def _keep_proxy(self) -> None:
        """The proxy; should it end, the socket stays open and clients wait for the next one."""
        plan = ProxyPlan(
            listen=f"fd/{self._sock.fileno()}",
            replicas=[each.launch.socket for each in self.replicas],
            admin=self._admin_path,
            storage=self._folder / "caddy",
            drain_s=self._drain_s,
        )
        text = json.dumps(configuration(plan)).encode()
        # It keeps no state worth a place in the user's home.
        environment = {**os.environ, "HOME": str(self._folder), "XDG_CONFIG_HOME": str(self._folder)}
        environment.pop("NOTIFY_SOCKET", None)  # Caddy would tell systemd that it is ready; the replicas are not
        command = [self._caddy, "run", "--config", "-"]
        while not self._stop.is_set():
            self._proxy = await spawn(
                command,
                environment,
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[self._sock.fileno()],
            )
            _, said = await self._proxy.communicate(text)
            if not self._stop.is_set():
                last = said.decode(errors="replace").strip().rpartition("\n")[2]
                logger.error("the proxy %s (%s); starting it again", _ended(self._proxy.returncode), last or "no message")
                await asyncio.sleep(1)

    async def _report(self) -> None:
        """Say when all are warm, and keep systemd informed."""
        while True:
            num_ready = sum(each.state == "ready" for each in self.replicas)
            if not self._warm and num_ready == len(self.replicas):
                self._warm = True
                logger.info("ready: %s/v1", self._url)
                self._notifier.ready()
            self._notifier.status(f"{num_ready} of {len(self.replicas)} replicas ready")
            self._notifier.beat()
            await asyncio.sleep(0.1)

    async def _end(self, keepers: Sequence[asyncio.Task]) -> None:
        """Refuse new connections, let what runs finish for `drain_s`, then tell the replicas to end."""
        self._notifier.stopping()
        self._sock.close()  # the proxy's own copy is the last
        if self._proxy is not None and self._proxy.returncode is None:
            self._proxy.terminate()
            await self._first_of(self._proxy.wait(), self._hurry.wait(), timeout_s=self._drain_s)
        running = [each.process for each in self.replicas if each.pid is not None]
        for process in running:
            process.terminate()
        for process in filter(None, (*running, self._proxy)):
            try:
                await asyncio.wait_for(process.wait(), TOLD_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        for each in self.replicas:
            if each.pid is not None:  # it was being started as the signal came
                each.process.kill()
                await each.process.wait()
            each.state = "stopped"

    @staticmethod
    async def _first_of(*waits, timeout_s: float) -> None:
        tasks = [asyncio.ensure_future(each) for each in waits]
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


def _ended(status: int) -> str:
    """An exit status in words."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
