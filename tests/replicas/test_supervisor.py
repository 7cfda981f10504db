"""Two replicas behind one address: one is killed, requests are counted, and the end is gentle."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.replicas.box import Box

SHORT = {"prompt": "hi", "max_tokens": 3, "temperature": 0, "tree_budget": 2, "return_token_ids": True}
ENDLESS = {"prompt": "hi", "stream": True, "max_tokens": 90_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def box():
    box = Box("--replicas", "2", "--tree-budget", "4")
    yield box
    assert box.end() == 0, box.log
    assert "Traceback" not in box.log and box.log.rstrip().endswith("bye")


def healthy(box) -> bool:
    return box.http.get("/health").json().get("status") == "ok"


def complete(box) -> httpx.Response:
    return box.http.post("/v1/completions", json=SHORT)


def running_replica(box, besides=()) -> dict:
    """The replica that serves the stream just begun."""
    found = []
    box.wait_for(lambda: found.extend(r for r in box.replicas() if r.get("running") and r["index"] not in besides) or found)
    return found[0]


def test_one_address_speaks_for_all(box):
    assert box.http.get("/health").json() == {"status": "ok", "replicas": {"ready": 2, "total": 2, "not_ready": []}}
    stats = box.http.get("/stats").json()
    assert stats["running"] == stats["waiting"] == 0 and stats["model"] == "toy" and len(stats["replicas"]) == 2
    assert stats["batch_invariant"] is False and not any("batch_invariant" in each for each in stats["replicas"])
    assert len({each["pid"] for each in stats["replicas"]}) == 2
    assert box.metric("ddtree:replica_up") == {"0": 1, "1": 1}
    assert set(box.metric("ddtree:num_requests_running")) == {"0", "1"}
    text = box.http.get("/metrics").text
    assert text.count("# TYPE ddtree:num_requests_running gauge") == 1
    for path in ("/v1/models", "/v1/models/toy", "/version", "/openapi.json", "/"):
        assert box.http.get(path).status_code == 200, path
    assert box.http.post("/tokenize", json={"prompt": "ab"}).json()["count"] == 2


def test_500_requests_are_answered_once_each(box):
    before = sum(box.metric("ddtree:request_success_total").values())
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: complete(box), range(500)))
    assert {answer.status_code for answer in answers} == {200}
    assert {tuple(answer.json()["choices"][0]["token_ids"]) for answer in answers} == {(97, 98, 97)}
    assert len({answer.json()["id"] for answer in answers}) == 500
    done = box.metric("ddtree:request_success_total")
    assert sum(done.values()) - before == 500
    assert min(done.values()) > 50  # both had their share


def test_requests_of_a_session_stay_together(box):
    before = box.metric("ddtree:request_success_total")
    for _ in range(12):
        assert box.http.post("/v1/completions", json=SHORT, headers={"X-Session-Id": "ann"}).status_code == 200
    after = box.metric("ddtree:request_success_total")
    assert sorted(after[each] - before.get(each, 0) for each in after) == [0, 12]


def test_a_replica_that_dies_takes_only_its_own_requests(box):
    restarts = sum(box.metric("ddtree:replica_restarts_total").values())
    with (
        box.http.stream("POST", "/v1/completions", json=ENDLESS) as doomed,
        httpx.Client(base_url=box.url, trust_env=False, timeout=60) as other,
    ):
        lines = doomed.iter_lines()
        next(lines)
        victim = running_replica(box)
        with other.stream("POST", "/v1/completions", json=ENDLESS) as spared:
            spared_lines = spared.iter_lines()
            next(spared_lines)
            running_replica(box, besides=(victim["index"],))  # the least busy one, not the same
            os.kill(victim["pid"], signal.SIGKILL)
            # The stream breaks off, which every client takes for the error it is; it does not end as if all were said.
            seen = []
            with pytest.raises(httpx.RemoteProtocolError):
                seen.extend(lines)
            assert "data: [DONE]" not in seen
            # The system may take connections for it a moment longer: those are 502.
            box.wait_for(lambda: complete(box).status_code == 200)
            assert all(complete(box).status_code == 200 for _ in range(10))
            health = box.http.get("/health")
            assert health.status_code == 200
            assert health.json() == {
                "status": "degraded",
                "replicas": {"ready": 1, "total": 2, "not_ready": [victim["index"]]},
            }
            assert box.metric("ddtree:replica_up")[str(victim["index"])] == 0
            for _ in range(20):
                assert json.loads(next(line for line in spared_lines if line)[6:])["choices"]
    box.wait_for(lambda: healthy(box))
    again = box.replicas()[victim["index"]]
    assert again["pid"] != victim["pid"] and again["restarts"] > victim["restarts"]
    assert sum(box.metric("ddtree:replica_restarts_total").values()) == restarts + 1
    assert f"replica {victim['index']} was ended by SIGKILL" in box.log


def test_500_requests_with_a_death_among_them(box):
    box.wait_for(lambda: healthy(box))
    victim, sent, killed = box.replicas()[0]["pid"], [], threading.Lock()

    def one(number):
        sent.append(number)
        if len(sent) > 100 and killed.acquire(blocking=False):
            os.kill(victim, signal.SIGKILL)
        return complete(box)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(500)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) + statuses.count(502) == 500
    assert statuses.count(502) <= 8  # what was under way there, at most
    for answer in answers:
        if answer.status_code == 502:
            assert answer.json()["error"]["code"] == "replica_died"
        else:
            assert answer.json()["choices"][0]["token_ids"] == [97, 98, 97]
    box.wait_for(lambda: healthy(box))
