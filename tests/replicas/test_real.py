"""Two real replicas on a CPU: ready in time, equal answers with every field, and a death among 500 requests."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.replicas.box import REAL, Box

pytestmark = [pytest.mark.real, pytest.mark.long]

ASK = {
    "messages": [{"role": "user", "content": "What is 17 * 3?"}],
    "max_tokens": 24,
    "temperature": 0,
    "tree_budget": 16,
    "enable_thinking": True,
    "return_token_ids": True,
    "stop_token_ids": [7],
    "seed": 5,
}


@pytest.fixture(scope="module")
def box():
    box = Box("hybrid-tiny", "--replicas", "2", program=REAL, timeout_s=180)
    yield box
    assert box.end() == 0, box.log


def chat(box, **fields) -> dict:
    return box.http.post("/v1/chat/completions", json=ASK | fields).raise_for_status().json()


def test_every_field_reaches_both_replicas_and_they_answer_alike(box):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda budget: chat(box, tree_budget=budget), [0, 16, 64, 16, 0, 64]))
    assert len({tuple(each["choices"][0]["token_ids"]) for each in answers}) == 1
    assert [each["ddtree"]["tree_budget"] for each in answers] == [0, 16, 64, 16, 0, 64]
    assert all(each["ddtree"]["seed"] == 5 and each["choices"][0]["message"]["reasoning_content"] for each in answers)
    assert min(box.metric("ddtree:request_success_total").values()) > 0
    refused = box.http.post("/v1/chat/completions", json=ASK | {"tree_budget": "16"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tree_budget"


def test_a_replica_killed_in_mid_stream_returns(box):
    endless = ASK | {"stream": True, "max_tokens": 3000, "ignore_eos": True, "stop_token_ids": None, "tree_budget": 0}
    with box.http.stream("POST", "/v1/chat/completions", json=endless) as doomed:
        lines = doomed.iter_lines()
        next(lines)
        found = []
        box.wait_for(lambda: found.extend(each for each in box.replicas() if each.get("running")) or found)
        victim = found[0]
        os.kill(victim["pid"], signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    # The system may take connections for it a moment longer: those are 502.
    box.wait_for(lambda: box.http.post("/v1/chat/completions", json=ASK).status_code == 200)
    assert box.http.get("/health").json()["status"] == "degraded"
    box.wait_for(lambda: box.http.get("/health").json()["status"] == "ok", timeout_s=120)
    assert box.replicas()[victim["index"]]["restarts"] == 1


def test_500_requests_of_which_none_is_lost_or_answered_twice(box):
    before = sum(box.metric("ddtree:request_success_total").values())
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: chat(box, stream=False, max_tokens=8, seed=number), range(500)))
    assert len({each["id"] for each in answers}) == 500
    assert [each["ddtree"]["seed"] for each in answers] == list(range(500))
    assert len({json.dumps(each["choices"][0]["token_ids"]) for each in answers}) == 1
    done = box.metric("ddtree:request_success_total")
    assert sum(done.values()) - before == 500 and min(done.values()) > 100
