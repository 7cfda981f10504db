"""The HTTP client against the real app over a scripted engine, and against canned streams with known pauses."""

import asyncio
import json
import time

import httpx
import pytest

from ddtree.bench.offline import Settings
from ddtree.bench.report import notes
from ddtree.bench.run import Facts, run_served
from ddtree.bench.serving import Serving, StreamReader
from ddtree.bench.workloads import Prompt
from tests.server.fakes import THINKING_TEMPLATE, ScriptEngine, serving

PROMPTS = [Prompt(f"p{i}", (f"prompt {i}", "more")[: 1 + i % 2], "toy") for i in range(3)]
FACTS = Facts(
    "toy", None, "off", "ddtree bench --url", lambda config, item: f"ddtree audit --budgets 0,{config}"
)
LONG = "The quick brown fox jumps over the lazy dog."


def hush(line):
    pass


def settings(**options):
    return Settings(**{"configs": ("0", "8"), "max_tokens": 64, "repeats": 2, **options})


class Drafting(ScriptEngine):
    """Says that it drafted."""

    def _stats(self, request, *args):
        stats = super()._stats(request, *args)
        stats.nodes_verified = request.tree_budget * stats.decode_rounds
        return stats


def measured(script=LONG, engine=Drafting, options=None, **client):
    with serving(engine(script)) as served:
        transport = httpx.ASGITransport(served.app)
        return run_served(
            Serving("http://test/v1", settings(**(options or {})), transport=transport, **client),
            PROMPTS,
            FACTS,
            hush,
        )


def test_a_run_over_http():
    result = measured(concurrency=2)
    assert result["refused"] is False, result["reasons"]
    assert result["modes"] == {"0": ["target_only"], "8": ["ddtree"]} and result["items"] == 4
    assert (
        result["concurrency"] == 2 and result["dtype"] and result["output_tokens"]["median"] == len(LONG) + 1
    )
    assert result["batch_invariant"] is False  # said by the server, not unknown
    row = result["configs"]["8"]
    assert row["acceptance_length"] == 3 and row["throughput_tokens_per_s"]["median"] > 0
    assert row["output_tokens"] == 4 * 2 * (len(LONG) + 1) and not notes(result)[1:]


def test_short_replies_and_fallbacks_are_refused_there_too():
    assert {reason["kind"] for reason in measured("hello")["reasons"]} == {"short"}
    assert measured("hello", options={"ignore_eos": True, "max_tokens": 32})["eos_policy"].startswith(
        "ignored"
    )
    (reason,) = measured(engine=ScriptEngine)["reasons"]
    assert reason["kind"] == "fell_back" and "no node" in reason["message"]


def stream(pieces, pause_s=0.0, report=True, count=None):
    """A transport whose server streams `pieces` of token ids."""
    total = sum(map(len, pieces)) if count is None else count

    async def events():
        for piece in pieces:
            await asyncio.sleep(pause_s)
            choice = {"index": 0, "delta": {"content": "x" * len(piece)}, "token_ids": piece}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n: keep-alive\n\n".encode()
        yield b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}\n\n'
        yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': total, 'prompt_tokens': 5}})}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def answer(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "other"}]})
        if request.url.path == "/stats":
            return httpx.Response(404)
        return httpx.Response(200, content=events())

    return httpx.MockTransport(answer)


def test_times_are_of_events_and_counts_of_ids():
    client = Serving(
        "http://x", settings(configs=("0",)), transport=stream([[1], [2, 3, 4], [5, 6, 7]], 0.03)
    )
    items, answers = client.inspect(PROMPTS[:1], hush)
    output = answers["p0"]["0"]
    assert output.output_tokens == 7 and output.token_ids == (1, 2, 3, 4, 5, 6, 7) and len(output.itl_s) == 2
    assert 0.025 < output.ttft_s < 0.5 and output.decode_s > 0.05
    assert output.tpot_s == pytest.approx(output.decode_s / 6) and min(output.itl_s) > 0.025


def test_a_thought_goes_into_the_next_turn_as_one():
    """Untagged it would stay in the conversation, where the template drops earlier thoughts."""
    engine = Drafting(f"{LONG}</think>\n\n{LONG}")
    with serving(engine, THINKING_TEMPLATE) as served:
        client = Serving("http://test/v1", settings(max_tokens=200), transport=httpx.ASGITransport(served.app))
        client.inspect([Prompt("p", ("a", "b"), "toy")], hush)
    last = bytes(engine.added[-1].prompt_token_ids).decode()
    assert f"assistant: <think>\n{LONG}\n</think>\n\n{LONG}\nuser: b\n" in last


def test_another_server_is_timed_plain_only():
    transport = stream([[1], list(range(2, 40))])
    plain = run_served(
        Serving("http://x", settings(configs=("0",)), transport=transport), PROMPTS[:1], FACTS, hush
    )
    assert plain["refused"] is False and plain["dtype"] is None
    trees = run_served(Serving("http://x", settings(), transport=transport), PROMPTS[:1], FACTS, hush)
    assert [reason["kind"] for reason in trees["reasons"]] == ["fell_back"]
    wrong = stream([[1], list(range(2, 40))], count=50)
    counted = run_served(
        Serving("http://x", settings(configs=("0",)), transport=wrong), PROMPTS[:1], FACTS, hush
    )
    assert [reason["kind"] for reason in counted["reasons"]] == ["counts"]


def test_a_server_that_does_not_stream_cannot_be_timed():
    client = Serving("http://x", settings(configs=("0",)), transport=stream([list(range(40))]))
    with pytest.raises(ValueError, match="all 40 tokens came in one event"):
        client.inspect(PROMPTS[:1], hush)


def test_concurrency_overlaps_and_arrivals_wait():
    prompts = [Prompt(f"p{i}", ("x",), "toy") for i in range(4)]

    def seconds(**limits):
        client = Serving(
            "http://x", settings(configs=("0",), repeats=1), transport=stream([[1], [2]], 0.04), **limits
        )
        items, _ = client.inspect(prompts, hush)
        started = time.perf_counter()
        outputs = list(client.measure(items, hush))
        return time.perf_counter() - started, outputs

    assert seconds()[0] > 0.3 > seconds(concurrency=4)[0]
    client = Serving("http://x", settings(), rate=5.0, transport=stream([[1]]))
    assert client.concurrency is None and client._arrivals(3, 0) == client._arrivals(
        3, 0
    ) != client._arrivals(3, 1)
    queued = seconds(rate=1000.0, concurrency=1)[1]
    assert max(output.ttft_s for output in queued) > 0.2, "waiting behind others is part of the TTFT"


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"choices": [{"delta": {"content": "a"}}]}],
        [{"choices": [{"token_ids": [1], "finish_reason": "stop"}]}],
    ],
)
def test_a_broken_stream_is_an_error(events):
    reader = StreamReader("p0", "8")
    for event in events:
        reader.feed(event, 0.1)
    with pytest.raises(ValueError, match="p0, budget 8"):
        reader.output()
    with pytest.raises(ValueError, match="stream failed"):
        reader.feed({"error": {"message": "m"}}, 0.1)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="chain"):
        Serving("http://x", settings(configs=("0", "chain")))
    dead = httpx.MockTransport(lambda request: httpx.Response(500, text="broken"))
    with pytest.raises(ValueError, match="500"):
        Serving("http://x", settings(), transport=dead)


@pytest.mark.parametrize(("gap", "exact", "refused"), [(2e-5, False, False), (0.3, False, True), (2e-5, True, True)])
def test_a_difference_is_a_near_tie_only_where_the_server_itself_hardly_prefers_a_token(gap, exact, refused):
    """Scored by the server's log-probabilities after a fresh prefill; its decoding is 3e-5 off that. Never of a batch-invariant server."""

    def answer(request):
        body = json.loads(request.content) if request.content else {}
        if request.url.path in ("/v1/models", "/stats"):
            return httpx.Response(200, json={"data": [{"id": "other"}], "dtype": "float32", "batch_invariant": exact})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1, 2, 3]})
        if request.url.path == "/v1/completions":
            count = body["max_tokens"]
            top = [{"a": -0.5 + (3e-5 if count > 1 else 0.0), "b": -0.5 - gap}] * count
            choice = {"text": "x" * count, "token_ids": [7] * count, "logprobs": {"top_logprobs": top}}
            return httpx.Response(200, json={"choices": [choice]})
        budget, ids = body["tree_budget"], list(range(40))
        ids[20] += 100 * (budget > 0)
        report = {"mode": "ddtree" if budget else "target_only", "tree_budget": budget, "decode_rounds": 13, "nodes_verified": budget}
        report |= {"acceptance_histogram": {"3": 13}, "output_tokens": 40, "trimmed_tokens": 0}
        events = [
            *({"choices": [{"delta": {"content": "x" * 20}, "token_ids": ids[at : at + 20]}]} for at in (0, 20)),
            {"choices": [{"delta": {}, "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": 40, "prompt_tokens": 3}, "ddtree": report},
        ]
        return httpx.Response(200, text="".join(f"data: {json.dumps(each)}\n\n" for each in events))

    client = Serving("http://x", settings(max_tokens=40, repeats=1), transport=httpx.MockTransport(answer))
    result = run_served(client, PROMPTS[:1], FACTS, hush)
    assert result["refused"] is refused
    if refused:
        assert [reason["kind"] for reason in result["reasons"]] == ["differs"]
    else:
        (tie,) = result["near_ties"]
        assert (tie["config"], tie["position"], tie["margin"]) == ("8", 20, pytest.approx(2e-5, abs=1e-6))
