"""/metrics: Prometheus text whose counters agree with the answers; CORS and keys around it."""

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fakes import ScriptEngine, serving, wait_for
from tests.server.scripted import scripted_server


def samples(client):
    response = client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    found = {}
    for family in families:
        for sample in family.samples:
            label = sample.labels.get("position") or sample.labels.get("finished_reason")
            if "le" not in sample.labels:
                found[sample.name + (f"/{label}" if label else "")] = sample.value
    return found


def test_counters_agree_with_the_answers():
    with scripted_server("some") as client:
        answers = [client.complete("hello", max_tokens=20, tree_budget=b, temperature=0).json() for b in (0, 16, 64)]
        wait_for(lambda: not client.worker.num_running)
        found = samples(client)
    reports = [answer["ddtree"] for answer in answers]
    drafted = [report for report in reports if report["nodes_verified"]]

    def total(name, rows):
        return sum(row[name] for row in rows)

    assert found["ddtree:prompt_tokens_total"] == 15
    assert found["ddtree:generation_tokens_total"] == total("output_tokens", reports)
    assert found["ddtree:decode_rounds_total"] == total("decode_rounds", reports)
    assert found["ddtree:spec_decode_num_drafts_total"] == total("decode_rounds", drafted) > 0
    assert found["ddtree:spec_decode_num_draft_tokens_total"] == total("nodes_verified", drafted)
    accepted = total("accepted_tokens", reports)
    assert found["ddtree:spec_decode_num_accepted_tokens_total"] == accepted > 0
    per_depth = [
        v for name, v in found.items() if name.startswith("ddtree:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(per_depth) == accepted and per_depth == sorted(per_depth, reverse=True)
    assert sum(v for name, v in found.items() if name.startswith("ddtree:request_success_total")) == 3
    assert found["ddtree:tree_nodes_count"] == 2 and found["ddtree:tree_budget_sum"] == 80
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert found[f"ddtree:{name}_count"] == 3
    assert found["ddtree:inter_token_latency_seconds_count"] == total("decode_rounds", reports)
    assert found["ddtree:num_requests_running"] == found["ddtree:num_requests_waiting"] == 0
    assert found["ddtree:prefix_cache_queries_total"] == 15
    assert found["ddtree:prefix_cache_hits_total"] == total("cached_tokens", reports) == 0
    assert found["ddtree:num_preemptions_total"] == total("preemptions", reports) == 0


def test_gauges_and_aborts():
    gate = threading.Event()
    with serving(ScriptEngine(gate=gate, max_running=1)) as client:
        threads = [threading.Thread(target=client.complete) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: client.worker.num_running == 1 and client.worker.num_waiting == 2)
        found = samples(client)
        assert (found["ddtree:num_requests_running"], found["ddtree:num_requests_waiting"]) == (1, 2)
        gate.set()
        for thread in threads:
            thread.join()
        wait_for(lambda: not client.worker.num_running)
        assert samples(client)["ddtree:request_success_total/stop"] == 3


def test_rounds_are_counted_while_a_stream_runs():
    """A graph of acceptance must move during a long answer, not jump at its end; an abort loses nothing either."""
    with scripted_server("right") as client:
        engine, turn, gate = client.engine, threading.Event(), threading.Semaphore(4)
        step = engine.step

        def gated():
            if not gate.acquire(timeout=0.02):
                turn.set()
                return []
            return step()

        engine.step = gated
        runner = threading.Thread(target=lambda: client.complete("hello", max_tokens=200, tree_budget=16, ignore_eos=True))
        runner.start()
        assert turn.wait(5)
        # One step was the prefill, three were rounds.
        found = samples(client)
        assert found["ddtree:decode_rounds_total"] == found["ddtree:spec_decode_num_drafts_total"] == 3
        accepted = found["ddtree:spec_decode_num_accepted_tokens_total"]
        assert found["ddtree:generation_tokens_total"] == 1 + 3 + accepted and accepted > 3
        assert "ddtree:request_success_total/length" not in found
        engine.step = step
        runner.join()


def test_metrics_before_the_engine_is_ready():
    hold = threading.Event()
    with serving(load=lambda: hold.wait() and None) as client:
        assert client.get("/metrics").status_code == 200
        hold.set()


PREFLIGHT = {"Origin": "http://page.test", "Access-Control-Request-Method": "POST"}


@pytest.mark.parametrize(
    ("origins", "answer"), [(("*",), "*"), (("http://page.test",), "http://page.test"), ((), None)]
)
def test_cors(origins, answer):
    with serving(cors_origins=origins, api_key="k") as client:
        preflight = client.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.headers.get("access-control-allow-origin") == answer
        if answer:
            assert preflight.status_code == 200 and "POST" in preflight.headers["access-control-allow-methods"]
        # Scripts of a page can read the refusal too, or they see a network error and nothing else.
        refused = client.get("/v1/models", headers={"Origin": "http://page.test"})
        assert refused.status_code == 401 and refused.headers.get("access-control-allow-origin") == answer


def test_other_origins_are_not_let_in():
    with serving(cors_origins=("http://page.test",)) as client:
        preflight = client.request("OPTIONS", "/v1/models", headers=PREFLIGHT | {"Origin": "http://other.test"})
        assert "access-control-allow-origin" not in preflight.headers
