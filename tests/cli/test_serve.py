"""ddtree serve as a process: a real socket, a stream, and a clean end at a signal."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]


class Process:
    """The stub server as a child process; its log lines as they come."""

    def __init__(self, *flags):
        command = [sys.executable, "-m", "tests.cli.stubs", "serve", "--port", "0", "--tree-budget", "4", *flags]
        environment = {**os.environ, "NO_PROXY": "*"}
        self.child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
        self.log = ""
        self.ready = threading.Event()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        assert self.ready.wait(60), self.log
        self.url = re.search(r"ready: (\S+)/v1", self.log).group(1)

    def _read(self):
        for line in self.child.stderr:
            self.log += line
            if "ready: " in line:
                self.ready.set()

    def wait(self):
        code = self.child.wait(30)
        self.reader.join(10)
        self.child.stderr.close()
        return code


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(sig):
    process = Process("--served-model-name", "alias/x")
    with httpx.Client(base_url=process.url, trust_env=False, timeout=30) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models/alias/x").status_code == 200
        body = {"prompt": "hi", "max_tokens": 3, "temperature": 0}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "aba"
        # One that leaves in the middle of its stream, and one that is still there at the end.
        endless = {"prompt": "hi", "stream": True, "max_tokens": 90_000}
        with client.stream("POST", "/v1/completions", json=endless) as response:
            next(response.iter_lines())
        with client.stream("POST", "/v1/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            process.child.send_signal(sig)
            rest = list(lines)
        assert any("error" in line for line in rest) or rest[-2:] == ["data: [DONE]", ""]
    assert process.wait() == 0, process.log
    assert "Traceback" not in process.log and process.log.rstrip().endswith("bye")


def test_a_load_that_fails_ends_it_with_one_line():
    script = (
        "import sys; from tests.cli import stubs; stubs.install(setattr, stubs.stub_engine());"
        "import ddtree.cli.serve as s\n"
        "def load(args, source): raise ValueError('drafter is 64 wide, target 576')\n"
        "s.load = load\n"
        "from ddtree.cli.main import main; sys.exit(main(['serve', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.rstrip().splitlines()[-1] == "ddtree: error: drafter is 64 wide, target 576"
