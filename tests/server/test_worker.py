"""The engine's thread: clients that leave, a full queue, faults, death, and an orderly end."""

import asyncio
import threading

import pytest

from ddtree.engine.request import Emission
from ddtree.server.batch import Facts
from tests.server.fakes import FACTS, ScriptEngine, call_and_leave, parse_events, serving, wait_for

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def in_background(call):
    """Run a blocking call in a thread; join() returns its result."""
    box = []
    thread = threading.Thread(target=lambda: box.append(call()))
    thread.start()

    def join():
        thread.join(10)
        assert box, "the call did not return"
        return box[0]

    return join


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_leaves_frees_its_place(stream, started):
    gate = threading.Event()
    with serving(ScriptEngine("ab" * 200, 1, gate=gate)) as client:

        async def go():
            leave = asyncio.Event()
            body = {"messages": HI, "stream": stream, "ignore_eos": True, "n": 2}
            call = asyncio.create_task(call_and_leave(client.app, CHAT, body, leave))
            while client.worker.num_running < 2:
                await asyncio.sleep(0.005)
            if started:
                client.engine.max_running = 0  # steps go on and emit nothing: the decode that never ends
                gate.set()
                await asyncio.sleep(0.02)
            leave.set()
            await asyncio.wait_for(call, 20)

        asyncio.run(go())
        wait_for(lambda: not client.engine.live)
        assert sorted(client.engine.aborted) == [1, 2]
        wait_for(lambda: (client.worker.num_running, client.worker.num_waiting) == (0, 0))


def test_a_finished_request_is_not_aborted():
    with serving() as client:
        client.chat()
        client.stream(CHAT, messages=HI)
        client.chat()
        assert client.engine.aborted == []


def test_full_queue_is_429():
    gate = threading.Event()
    with serving(ScriptEngine(max_running=1, gate=gate), max_waiting=2) as client:
        calls = []
        for number in range(3):
            calls.append(in_background(client.chat))
            wait_for(lambda n=number: client.worker.num_running + client.worker.num_waiting == n + 1)
        response = client.chat()
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        stats = client.get("/stats").json()
        assert (stats["running"], stats["waiting"]) == (1, 2)
        gate.set()
        assert [join().status_code for join in calls] == [200, 200, 200]
        assert client.chat().status_code == 200


def test_a_fault_in_a_step_ends_what_ran_and_nothing_else():
    with serving(ScriptEngine(faults=1)) as client:
        response = client.chat()
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["type"] == "server_error" and "scripted fault" in error["message"]
        assert client.chat().status_code == 200
        assert client.get("/health").status_code == 200


def test_an_error_emission_fails_its_own_request_alone():
    gate = threading.Event()
    with serving(ScriptEngine(gate=gate)) as client:
        first = in_background(client.chat)
        wait_for(lambda: client.worker.num_running == 1)
        second = in_background(client.chat)
        wait_for(lambda: client.worker.num_running == 2)
        client.engine.fail_next = "bad grammar"
        gate.set()
        assert sorted([first().status_code, second().status_code]) == [200, 500]


def test_a_refusal_of_the_engine_is_400_and_leaves_nothing_behind():
    with serving(ScriptEngine(refuse=ValueError("too odd"))) as client:
        response = client.chat()
        assert response.status_code == 400 and "too odd" in response.json()["error"]["message"]
        client.engine.refuse = RuntimeError("broken")
        assert client.chat().status_code == 500
        client.engine.refuse = None
        assert client.chat().status_code == 200
        assert client.worker.num_waiting == 0


@pytest.mark.parametrize("stream", [False, True])
def test_death_of_the_thread_is_503(stream):
    class Deadly(ScriptEngine):
        def step(self):
            self.gate.wait(5)
            raise SystemError("the device is gone")

        def abort(self, request_id):
            raise SystemError("the device is gone")

    gate = threading.Event()
    with serving(Deadly(gate=gate)) as client:
        call = in_background(lambda: client.post(CHAT, {"messages": HI, "stream": stream}))
        wait_for(lambda: client.worker.num_running == 1)
        waiting = in_background(client.chat)
        wait_for(lambda: client.worker.num_waiting == 1)
        gate.set()
        response = call()
        if stream:
            chunks, done = parse_events(response.text)
            assert not done and "error" in chunks[-1]
        else:
            assert response.status_code in (500, 503)
        assert waiting().status_code == 503
        health = client.get("/health")
        assert health.status_code == 503 and "the device is gone" in health.json()["error"]["message"]
        assert client.chat().status_code == 503
        assert client.get("/stats").json()["state"] == "failed"


def test_a_step_that_never_ends_is_503():
    class Hanging(ScriptEngine):
        def step(self):
            gate.wait(10)
            return super().step()

    gate = threading.Event()
    with serving(Hanging()) as client:
        client.worker.stuck_after_s = 0.2
        call = in_background(client.chat)
        wait_for(lambda: client.worker.state == "stuck")
        health = client.get("/health")
        assert health.status_code == 503 and "not finished a step" in health.json()["error"]["message"]
        assert client.chat().status_code == 503
        assert client.get("/stats").json()["state"] == "stuck"
        gate.set()
        assert call().status_code == 200
        wait_for(lambda: client.get("/health").status_code == 200)


def test_what_is_prepared_and_never_ends_is_503():
    class Hanging(ScriptEngine):
        def prepare_one(self):
            gate.wait(10)
            return False

    gate = threading.Event()
    with serving(Hanging()) as client:
        client.worker.stuck_after_s = 0.2
        wait_for(lambda: client.worker.state == "stuck")
        assert client.get("/health").status_code == client.chat().status_code == 503
        gate.set()
        wait_for(lambda: client.get("/health").status_code == 200)
        assert client.chat().status_code == 200


@pytest.mark.parametrize("code", ["timeout", "queue_timeout"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_time_is_up_is_503(code, stream):
    class Impatient(ScriptEngine):
        def step(self):
            self.gate.wait(5)
            (request_id, *_) = self.live
            del self.live[request_id]
            return [Emission(request_id, (), "error", error="the request took 9.0 s", error_code=code)]

    gate = threading.Event()
    gate.set()
    with serving(Impatient(gate=gate)) as client:
        response = client.post(CHAT, {"messages": HI, "stream": stream})
        if stream and response.status_code == 200:
            error = parse_events(response.text)[0][-1]["error"]
        else:
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            error = response.json()["error"]
        assert error["code"] == code and "took 9.0 s" in error["message"]


@pytest.mark.parametrize("fault", [False, True])
def test_what_requests_would_wait_for_is_prepared_while_nobody_asks(fault):
    class Preparing(ScriptEngine):
        left, beside_work = 5, False

        def prepare_one(self):
            self.beside_work |= self.has_work
            between.wait(0.3)
            between.clear()
            self.left -= 1
            if fault and self.left == 2:
                raise RuntimeError("scripted: no memory")
            return self.left > 0

    between = threading.Event()
    with serving(Preparing()) as client:
        wait_for(lambda: client.get("/health").status_code == 200)
        call = in_background(client.chat)  # comes while something is prepared
        between.set()
        assert call().status_code == 200
        for _ in range(5):
            between.set()
            wait_for(lambda: not between.is_set() or client.engine.left in (0, 2 if fault else 0))
            assert client.chat().status_code == 200
        assert client.engine.left == (2 if fault else 0)
        assert not client.engine.beside_work


def test_503_until_warm():
    warm = threading.Event()

    def load():
        warm.wait(5)
        return ScriptEngine(), FACTS

    with serving(load=load) as client:
        for response in (client.get("/health"), client.chat(), client.get("/v1/models")):
            assert response.status_code == 503 and response.headers["retry-after"]
        assert client.get("/stats").json()["state"] == "starting"
        assert client.get("/version").status_code == 200
        warm.set()
        wait_for(lambda: client.get("/health").status_code == 200)
        assert client.chat().status_code == 200


def test_a_failed_load_is_told():
    def load():
        raise ValueError("drafter is 64 wide, target 576")

    with serving(load=load) as client:
        wait_for(lambda: client.worker.state == "failed")
        response = client.get("/health")
        assert response.status_code == 503 and "576" in response.json()["error"]["message"]
        assert isinstance(client.worker.error, ValueError)


def test_stop_ends_what_runs():
    gate = threading.Event()
    with serving(ScriptEngine(gate=gate)) as client:
        call = in_background(client.chat)
        wait_for(lambda: client.worker.num_running == 1)
        client.worker.stop()
        assert call().status_code == 503
        assert client.chat().status_code == 503
        assert not [t for t in threading.enumerate() if t is client.worker._thread and t.is_alive()]


def test_many_requests_and_cancels_leave_nothing():
    with serving(ScriptEngine("hello " * 5, 2)) as client:

        async def go():
            leave = asyncio.Event()
            leave.set()
            body = {"messages": HI, "stream": True}
            stay = [call_and_leave(client.app, CHAT, body, asyncio.Event()) for _ in range(40)]
            gone = [call_and_leave(client.app, CHAT, body, leave) for _ in range(20)]
            tasks = [asyncio.create_task(each) for each in stay + gone]
            return await asyncio.wait_for(asyncio.gather(*tasks), 20)

        sent = asyncio.run(go())
        assert all(sent[i][-1]["more_body"] is False for i in range(40))
        wait_for(lambda: not client.engine.live and not client.worker._live and not client.worker._inbox)
        assert (client.worker.num_running, client.worker.num_waiting) == (0, 0)


def test_facts_have_memory():
    facts = Facts(max_context=8, vocab_size=8, memory=lambda: {"peak_rss_bytes": 1})
    with serving(facts=facts) as client:
        stats = client.get("/stats").json()
    assert stats["memory"] == {"peak_rss_bytes": 1} and stats["max_context"] == 8
    assert {"model", "drafter", "device", "dtype", "running", "waiting"} <= set(stats)
