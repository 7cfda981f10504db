"""Whole answers: shapes, finish reasons, usage, choices, seeds, the ddtree object."""

import json
import math
import re

import pytest

from tests.server.fakes import EOS, PLAIN_TEMPLATE, THINKING_TEMPLATE, ScriptEngine, serving


@pytest.fixture(scope="module")
def client():
    with serving() as client:
        yield client


def test_chat_shape(client):
    body = client.chat("hi", model="whatever").json()
    assert body["object"] == "chat.completion" and re.fullmatch(r"chatcmpl-\w+", body["id"])
    assert body["model"] == "toy" and isinstance(body["created"], int) and body["system_fingerprint"]
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["index"]) == ("stop", EOS, 0)
    assert "token_ids" not in choice
    prompt = len("user: hi\nassistant: ")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_completion_shape(client):
    body = client.complete("hi", return_token_ids=True).json()
    assert body["object"] == "text_completion" and re.fullmatch(r"cmpl-\w+", body["id"])
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": EOS,
            "token_ids": [*b"hello", EOS],
        }
    ]
    assert body["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("step_size", [1, 2, 5])
def test_max_tokens_is_exact(n, step_size):
    with serving(ScriptEngine("hello", step_size)) as client:
        body = client.complete(max_tokens=n, return_token_ids=True).json()
    (choice,) = body["choices"]
    kept = min(n, 6)
    assert choice["token_ids"] == [*b"hello", EOS][:kept]
    assert choice["finish_reason"] == ("stop" if n >= 6 else "length")
    assert choice["text"] == "hello"[:kept]
    assert body["usage"]["completion_tokens"] == kept == body["ddtree"]["output_tokens"]


@pytest.mark.parametrize("step_size", [1, 2, 3, 7])
def test_stop_strings_cut_text_and_ids(step_size):
    with serving(ScriptEngine("one, two, three", step_size)) as client:
        body = client.complete(stop=["three", "two"], return_token_ids=True).json()
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one, ", "stop", "two")
        assert bytes(choice["token_ids"]) == b"one, two"
        assert body["usage"]["completion_tokens"] == 8 == body["ddtree"]["output_tokens"]
        # A held-back beginning of a stop string is text after all when nothing completes it.
        assert client.complete(stop="threes").json()["choices"][0]["text"] == "one, two, three"


def test_forged_stop_token(client):
    (choice,) = client.complete(stop_token_ids=[ord("l")], return_token_ids=True).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("he", "stop", ord("l"))
    assert bytes(choice["token_ids"]) == b"hel"


def test_ignore_eos_runs_to_the_cap(client):
    (choice,) = client.complete(ignore_eos=True, max_tokens=9).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hellohel", "length")
    assert client.engine.added[-1].eos_token_ids == frozenset()


def test_room_is_the_default_cap(client):
    client.complete("hi")
    assert client.engine.added[-1].max_tokens == 510


@pytest.mark.parametrize(("size", "fields"), [(512, {}), (600, {}), (500, {"max_tokens": 13})])
def test_too_long(client, size, fields):
    response = client.complete("a" * size, **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert str(size) in error["message"] and "512" in error["message"]


def test_last_place_of_the_context(client):
    assert client.complete("a" * 511).json()["choices"][0]["finish_reason"] == "length"


PROMPTS = [
    ("ab", [b"ab"]),
    (["ab", "c"], [b"ab", b"c"]),
    ([97, 98], [b"ab"]),
    ([[97], [98, 0]], [b"a", b"b\0"]),
    ([0], [b"\0"]),
]


@pytest.mark.parametrize(("prompt", "expected"), PROMPTS, ids=str)
def test_prompt_forms(client, prompt, expected):
    before = len(client.engine.added)
    body = client.complete(prompt).json()
    asked = [bytes(request.prompt_token_ids) for request in client.engine.added[before:]]
    assert asked == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert body["usage"]["completion_tokens"] == body["ddtree"]["output_tokens"] == 6 * len(expected)


def test_choices_share_the_seed_not_the_index(client):
    before = len(client.engine.added)
    body = client.complete(["a", "b"], n=2, seed=7).json()
    added = client.engine.added[before:]
    assert [request.choice_index for request in added] == [0, 1, 0, 1]
    assert {request.seed for request in added} == {7} and body["ddtree"]["seed"] == 7
    assert len(body["choices"]) == 4
    assert all(choice["ddtree"]["output_tokens"] == 6 for choice in body["choices"])
    assert body["usage"]["prompt_tokens"] == 2 and body["usage"]["completion_tokens"] == 24


def test_a_seed_is_drawn_and_echoed(client):
    seeds = {client.complete().json()["ddtree"]["seed"] for _ in range(3)}
    assert len(seeds) == 3
    assert client.engine.added[-1].seed in seeds


def test_too_many_choices_at_once(client):
    response = client.complete(["a"] * 3, n=100)
    assert response.status_code == 400 and "256" in response.json()["error"]["message"]


def test_sampling_reaches_the_engine(client):
    client.chat()
    sampling = client.engine.added[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    client.chat(temperature=0, top_p=0.5, top_k=-1, min_p=0.1)
    sampling = client.engine.added[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)


BUDGETS = [(None, 16), ("auto", "auto"), (0, 0), (1, 1), (1024, 1024), (5000, 1024), (2**16, 1024)]


@pytest.mark.parametrize(("asked", "effective"), BUDGETS)
def test_budgets_are_echoed(client, asked, effective):
    ddtree = client.chat(tree_budget=asked).json()["ddtree"]
    assert (ddtree["tree_budget_requested"], ddtree["tree_budget"]) == (asked, effective)
    assert ddtree["mode"] == ("ddtree" if effective else "target_only")


def test_ddtree_object(client):
    text = client.chat(tree_budget=4).text
    assert "NaN" not in text and "Infinity" not in text
    ddtree = json.loads(text)["ddtree"]
    assert set(ddtree) == {
        *("mode", "reason", "block_size", "tree_budget", "tree_budget_requested", "auto", "decode_rounds", "plain_rounds"),
        *("nodes_verified", "scoring", "conditioned_rounds"),
        *("accepted_tokens", "trimmed_tokens", "mean_acceptance_length", "acceptance_histogram", "output_tokens"),
        *("prefill_ms", "draft_ms", "verify_ms", "ttft_ms", "tokens_per_second", "cached_tokens", "preemptions", "seed"),
    }
    histogram = ddtree["acceptance_histogram"]
    emitted = sum(int(length) * count for length, count in histogram.items())
    assert ddtree["output_tokens"] == 1 + emitted - ddtree["trimmed_tokens"]
    assert math.isclose(ddtree["mean_acceptance_length"], emitted / ddtree["decode_rounds"])


def test_a_scoring_that_needs_an_adapter_is_refused_without_one(client):
    assert client.chat(scoring="factorised").status_code == 200
    assert client.engine.added[-1].scoring == "factorised"
    answer = client.chat(scoring="conditioned")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "scoring" and "needs an adapter" in error["message"]


def test_nothing_over_nothing_is_null(client):
    ddtree = client.chat(max_tokens=1).json()["ddtree"]
    assert ddtree["mean_acceptance_length"] is None and ddtree["tokens_per_second"] is None
    assert ddtree["acceptance_histogram"] == {}


THOUGHT = "why\nnot</think>\n\nyes"


@pytest.mark.parametrize("step_size", [1, 2, 3, 50])
def test_thought_and_answer(step_size):
    with serving(ScriptEngine(THOUGHT, step_size), THINKING_TEMPLATE) as client:
        body = client.chat().json()
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("why\nnot", "yes")
        details = body["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len("why\nnot</think>")
        body = client.chat(max_tokens=5).json()
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("why\nn", "")
        assert body["choices"][0]["finish_reason"] == "length"


SWITCHES = [
    ({}, True),
    ({"enable_thinking": False}, False),
    ({"enable_thinking": "false"}, False),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
    ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": "true"}}, True),
]


@pytest.mark.parametrize(("fields", "thinks"), SWITCHES, ids=str)
def test_thinking_switch(fields, thinks):
    with serving(template=THINKING_TEMPLATE) as client:
        message = client.chat(**fields).json()["choices"][0]["message"]
    assert message["content" if not thinks else "reasoning_content"] == "hello"


def test_thinking_where_the_template_knows_none():
    with serving(template=PLAIN_TEMPLATE) as client:
        assert client.chat(enable_thinking=False).status_code == 200
        assert client.chat(chat_template_kwargs={"enable_thinking": "false"}).status_code == 200
        response = client.chat(enable_thinking=True)
        assert response.status_code == 400 and response.json()["error"]["param"] == "enable_thinking"
        assert client.chat(enable_thinking="maybe").status_code == 400


def test_content_forms():
    with serving() as client:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [
            {"role": "developer", "content": "x"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None},
            {"role": "system", "content": "y"},
            {"role": "user", "content": "c", "name": "n"},
        ]
        assert client.post("/v1/chat/completions", {"messages": messages}).status_code == 200
        prompt = bytes(client.engine.added[-1].prompt_token_ids).decode()
    assert prompt == "system: x\n\ny\nuser: ab\nassistant: \nuser: c\nassistant: "


def test_no_template_points_to_completions():
    with serving(template=None) as client:
        response = client.chat()
        assert response.status_code == 400 and "/v1/completions" in response.json()["error"]["message"]
        assert client.complete().status_code == 200
