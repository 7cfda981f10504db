"""`--dataset` against a hub on this machine that speaks the Hub's own protocol: listing, headers, download, cache."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

FILES = {
    "README.md": b"# a set",
    "data/test.jsonl": b'{"question": "What is 1 + 1?"}\n{"question": "And 2 + 2?"}\n',
    "data/train.jsonl": b'{"question": "not this one"}\n',
}
COMMIT = "0" * 39 + "1"
SCRIPT = """
import sys
from ddtree.bench.dataset import dataset_prompts
from ddtree.cli.main import main
try:
    print(dataset_prompts(sys.argv[1]).read_text(), end="")
except ValueError as error:
    sys.exit(str(error))
"""


class Hub(BaseHTTPRequestHandler):
    """The data set org/set; anything else is not there."""

    asked: list[str] = []

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        path = self.path.partition("?")[0]
        Hub.asked.append(f"{self.command} {path}")
        headers = {}
        if path == "/api/datasets/org/set/tree/main":
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in FILES.items()]
            status, body, headers["Content-Type"] = 200, json.dumps(tree).encode(), "application/json"
        elif path.startswith("/datasets/org/set/resolve/main/") and path.removeprefix("/datasets/org/set/resolve/main/") in FILES:
            status, body = 200, FILES[path.removeprefix("/datasets/org/set/resolve/main/")]
            headers |= {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            status, body, headers["X-Error-Code"] = 404, b"{}", "RepoNotFound"
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(name, hub, tmp_path, **env):
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "DDTREE_CACHE": str(tmp_path / "ddtree")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", **env}
    environment.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in env else None
    return subprocess.run([sys.executable, "-c", SCRIPT, name], capture_output=True, text=True, timeout=300, env=environment)


def test_a_data_set_is_listed_fetched_and_kept(hub, tmp_path):
    first = ask("org/set", hub, tmp_path)
    assert first.returncode == 0, first.stderr
    prompts = [json.loads(line) for line in first.stdout.splitlines()]
    assert prompts == [{"id": "set-0", "turns": ["What is 1 + 1?"]}, {"id": "set-1", "turns": ["And 2 + 2?"]}]
    assert any(asked.startswith("GET /api/datasets/org/set/tree") for asked in Hub.asked)
    Hub.asked.clear()
    again = ask("org/set", hub, tmp_path)
    assert again.stdout == first.stdout and not Hub.asked, "kept, so nobody is asked"


def test_no_such_data_set(hub, tmp_path):
    found = ask("org/other", hub, tmp_path)
    assert found.returncode == 1 and "org/other: no such (or a private) data set on the Hub" in found.stderr
