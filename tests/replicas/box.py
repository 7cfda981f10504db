"""A box of replicas as a process: `ddtree serve --replicas N` over scripted engines, or over real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
STUBS = (sys.executable, "-m", "tests.cli.stubs")
REAL = (sys.executable, "-m", "ddtree")


class Box:
    """Started and warm; its log as it comes."""

    def __init__(self, *flags: str, program=STUBS, environment=None, timeout_s: float = 90):
        command = [*program, "serve", *flags, "--port", "0", "--device", "cpu"]
        env = {**os.environ, "NO_PROXY": "*", **(environment or {})}
        started = time.monotonic()
        self.child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
        self.log = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(timeout_s):
            self.end()
            raise AssertionError(self.log)
        self.start_s = time.monotonic() - started
        self.url = re.search(r"ready: (http\S+)/v1", self.log).group(1)
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60, limits=httpx.Limits())

    def _read(self) -> None:
        for line in self.child.stderr:
            self.log += line
            if "ready: http" in line:
                self._ready.set()

    def replicas(self) -> list[dict]:
        """What /stats says of each."""
        return self.http.get("/stats").raise_for_status().json()["replicas"]

    def metric(self, name: str) -> dict[str, float]:
        """A metric's value of each replica, summed over its other labels."""
        values: dict[str, float] = {}
        for replica, value in re.findall(rf'^{name}{{replica="(\d+)".*}} (\S+)$', self.http.get("/metrics").text, re.M):
            values[replica] = values.get(replica, 0) + float(value)
        return values

    def wait_for(self, condition, timeout_s: float = 60) -> None:
        """Poll until true; an assertion with the log otherwise."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, self.log
            time.sleep(0.05)

    def end(self) -> int:
        """SIGTERM, and the exit status."""
        if self._ready.is_set():
            self.http.close()
        self.child.terminate()
        code = self.child.wait(60)
        self._reader.join(10)
        self.child.stderr.close()
        return code
