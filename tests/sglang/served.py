"""A real SGLang server with the plugin, on a CPU, for the length of a test module; and what it says of its rounds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

STAND_IN = Path(__file__).parent / "stand_in"
START_S = 400  # of three processes that import torch and SGLang, on cores that others use too
ANSWER_S = 300


class Server:
    """`python -m sglang.launch_server --speculative-algorithm DDTREE ...` in its own process group."""

    def __init__(self, target: Path, drafter: Path, folder: Path, num_nodes: int, ranks: int = 1) -> None:
        self.port, self.trace, self.log = _free_port(), folder / "rounds.jsonl", folder / "server.log"
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", target, "--port", self.port, "--device", "cpu",
            "--dtype", "float32", "--tp-size", ranks, "--speculative-algorithm", "DDTREE",
            "--speculative-draft-model-path", drafter, "--speculative-num-draft-tokens", num_nodes,
            "--max-total-tokens", 20000, "--max-running-requests", 8, "--context-length", 2048, "--skip-server-warmup", "--sleep-on-idle",
        ]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_DDTREE_TRACE": str(self.trace),
            "OMP_NUM_THREADS": "1",
        }
        if ranks > 1:
            cores = sorted(os.sched_getaffinity(0))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command], env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True
            )

    def wait(self) -> Server:
        """Until it answers; RuntimeError with the end of its log where it does not."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return self
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"SGLang did not start:\n{self.log.read_text()[-3000:]}")

    def post(self, path: str, body: dict):
        """The answer's JSON; HTTPError as urllib raises it."""
        return json.load(self._open(path, body))

    def stream(self, path: str, body: dict) -> list[dict]:
        """The events of a stream, which must end as OpenAI's do."""
        lines = [line.decode().strip() for line in self._open(path, {**body, "stream": True})]
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def rounds(self) -> list[dict]:
        """Every round so far, as the plugin's trace tells it."""
        return [json.loads(line) for line in self.trace.read_text().splitlines()] if self.trace.exists() else []

    def stop(self) -> None:
        """End it and its ranks."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _open(self, path: str, body: dict):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=ANSWER_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
