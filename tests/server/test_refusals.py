"""Nothing is accepted and ignored: what is not there yet is a 400 that names it, its default passes."""

import pytest

from ddtree.server.refusals import CHAT, COMPLETION, TOKENIZE
from tests.server.fakes import serving


@pytest.fixture(scope="module")
def client():
    with serving() as client:
        yield client


ASKS_FOR_IT = {
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "chat_template_kwargs": {"x": 1},
    "enable_thinking": True,
    "messages": [{"role": "user", "content": "hi"}],
    "cache_prompt": "yes",
    "echo": True,
    "best_of": 2,
    "use_beam_search": True,
    "early_stopping": True,
    "include_reasoning": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "add_generation_prompt": False,
    "verbosity": "high",
}


@pytest.mark.parametrize("name", CHAT)
def test_chat_refuses_and_names(client, name):
    value = 0.5 if name == "add_special_tokens" else ASKS_FOR_IT.get(name, 0.5)
    response = client.chat(**{name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name and name in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", COMPLETION)
def test_completions_refuse_and_name(client, name):
    response = client.complete(**{name: ASKS_FOR_IT.get(name, 0.5)})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("name", TOKENIZE)
def test_tokenize_refuses(client, name):
    response = client.post("/tokenize", {"prompt": "x", name: ASKS_FOR_IT.get(name, 0.5)})
    assert response.status_code == 400


@pytest.mark.parametrize(("send", "table"), [("chat", CHAT), ("complete", COMPLETION)])
def test_defaults_and_null_pass(client, send, table):
    nulls = dict.fromkeys(table)
    nulls.pop("messages" if send == "chat" else "prompt", None)
    assert getattr(client, send)(**nulls).status_code == 200
    for name, neutral in table.items():
        for value in neutral:
            response = getattr(client, send)(**{name: value})
            assert response.status_code == 200, (name, value, response.text)


def test_zero_is_not_false(client):
    assert client.chat(logprobs=0).status_code == 400
    assert client.chat(frequency_penalty=False).status_code == 400
    assert client.chat(frequency_penalty=0.0).status_code == 200


def test_extra_body_is_explained(client):
    error = client.chat(extra_body={"tree_budget": 4}).json()["error"]
    assert error["param"] == "extra_body" and "top level" in error["message"]


def test_harmless_fields_pass(client):
    fields = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}
    assert client.chat(**fields, some_unknown_field=[1]).status_code == 200


BAD = [
    ("tree_budget", -1),
    ("tree_budget", "16"),
    ("tree_budget", 1.5),
    ("tree_budget", 10**9),
    ("tree_budget", True),
    ("tree_budget", "AUTO"),
    ("scoring", "both"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "16"),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("max_completion_tokens", 0),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "0"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("seed", "1"),
    ("seed", 1.5),
    ("seed", 2**63),
    ("n", 0),
    ("n", 129),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 1),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [258]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 3),
    ("ignore_eos", "true"),
    ("presence_penalty", 2.1),
    ("frequency_penalty", "1"),
    ("frequency_penalty", False),
    ("repetition_penalty", 0),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"258": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", [[5, 1]]),
    ("min_tokens", -1),
    ("logprobs", 21),
    ("top_logprobs", 21),
    ("stream", 1),
    ("return_token_ids", "yes"),
    ("model", 3),
]


@pytest.mark.parametrize(("name", "value"), BAD)
@pytest.mark.parametrize("send", ["chat", "complete"])
def test_bad_values_are_named(client, send, name, value):
    response = getattr(client, send)(**{name: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].partition("[")[0].partition(".")[0] == name
    assert name in error["message"]


def test_absurd_budget_names_value_and_maximum(client):
    message = client.chat(tree_budget=10**9).json()["error"]["message"]
    assert "1000000000" in message and "1024" in message


def test_stream_options_need_a_stream(client):
    assert client.chat(stream_options={"include_usage": True}).status_code == 400


def test_the_two_names_of_max_tokens_must_agree(client):
    assert client.chat(max_tokens=2, max_completion_tokens=3).status_code == 400
    assert client.chat(max_tokens=2, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


PROMPTS = [[], [-1], [258], [[]], [[0], []], [[0], [258]], ["a", 1], [True], 3, None, {}, [1.5], "", [[0], "a"]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_bad_prompts(client, prompt):
    response = client.complete(prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


MESSAGES = [
    [],
    None,
    "hi",
    ["hi"],
    [{"content": "no role"}],
    [{"role": "robot", "content": "hi"}],
    [{"role": "function", "content": "hi", "name": "f"}],
    [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": 5}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
]


@pytest.mark.parametrize("messages", MESSAGES, ids=str)
def test_bad_messages(client, messages):
    response = client.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages")
