"""Every value of whole, rich requests replaced by every other kind of JSON, one at a time: an answer or a 400 that
names the field, never a 500."""

import asyncio
import copy
import json

import httpx
import pytest

from ddtree.server.batch import Facts
from tests.server.fakes import VOCAB, ScriptEngine, serving
from tests.server.test_tools import TOOLS_TEMPLATE

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "look", "description": "d", "parameters": PARAMETERS, "strict": False}
FORMAT = {"name": "thing", "schema": {"type": "object", "properties": {"a": {"enum": [1]}}}, "strict": True}
SHARED = {
    "temperature": 0.5,
    "logit_bias": {"5": 1.0},
    "stop_token_ids": [3],
    "chat_template_kwargs": {"enable_thinking": False},
    "seed": 1,
    "tree_budget": 4,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Rom"}'}}
CHAT = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "content": "fine", "refusal": None},
        {"role": "user", "content": "and?"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "parallel_tool_calls": False,
    "max_completion_tokens": 4,
    "stop": ["x"],
    "stream_options": {"include_usage": True},
    "stream": True,
    **SHARED,
}
STRUCTURED = {
    "messages": [{"role": "user", "content": "hi"}],
    "response_format": {"type": "json_schema", "json_schema": FORMAT},
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 4,
}
RESPONSES = {
    "input": [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "id": "f", "call_id": "call_1", "name": "look", "arguments": '{"city": "Rom"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "fine"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "and?"},
    ],
    "instructions": "you are here",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "look"},
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 4,
    **SHARED,
}
RESPONSES_FORMAT = {"input": "hi", "text": {"format": {"type": "json_schema", **FORMAT}, "verbosity": "medium"}}
MESSAGES = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "look"},
                {"type": "tool_use", "id": "t", "name": "look", "input": {"city": "Rom"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ],
    "system": [{"type": "text", "text": "be brief"}],
    "tools": [{"name": "look", "description": "d", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "max_tokens": 4,
    "top_k": 3,
}
BODIES = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat with a schema": ("/v1/chat/completions", STRUCTURED),
    "completions": ("/v1/completions", {"prompt": ["hi", "ho"], "logprobs": 2, "max_tokens": 2, "stop": "x", **{k: v for k, v in SHARED.items() if "chat" not in k}}),
    "completions of ids": ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "echo": False}),
    "responses": ("/v1/responses", RESPONSES),
    "responses with a schema": ("/v1/responses", RESPONSES_FORMAT),
    "messages": ("/v1/messages", MESSAGES),
    "count_tokens": ("/v1/messages/count_tokens", {k: MESSAGES[k] for k in ("messages", "system", "tools", "tool_choice")}),
    "tokenize": ("/tokenize", {"messages": CHAT["messages"], "tools": CHAT["tools"], "chat_template_kwargs": {}}),
    "detokenize": ("/detokenize", {"tokens": [1, 2]}),
}
KINDS = [None, True, -1, 10**30, "", "x", [], [None], ["x"], [{}], {}, {"type": []}]
PER_PLACE = 5


def some(number):
    """A few of the kinds, others at the next place: all of them everywhere would take minutes."""
    return [KINDS[(number * PER_PLACE + i) % len(KINDS)] for i in range(PER_PLACE)]


def places(value, path=()):
    """Every place inside a JSON value, the whole excepted."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))


def replaced(body, path, value):
    changed = copy.deepcopy(body)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def without(body, path):
    changed = copy.deepcopy(body)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return changed


@pytest.fixture(scope="module")
def app():
    facts = Facts(max_context=4096, vocab_size=VOCAB, default_tree_budget=16, block_size=8)
    template = TOOLS_TEMPLATE + "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
    with serving(ScriptEngine("hello", step_size=8), template, facts=facts) as client:
        yield client.app


def posted(app, path, bodies):
    """The responses to all of them, over one client."""

    async def go():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.post(path, json=body) for body in bodies]

    return asyncio.run(go())


@pytest.mark.parametrize("name", BODIES)
def test_no_wrong_kind_anywhere_is_a_500(app, name):
    path, body = BODIES[name]
    (whole,) = posted(app, path, [body])
    assert whole.status_code == 200, whole.text
    changed = [(place, replaced(body, place, kind)) for number, place in enumerate(places(body)) for kind in some(number)]
    changed += [(place, without(body, place)) for place in places(body)]
    responses = posted(app, path, [each for _, each in changed])
    for (place, sent), response in zip(changed, responses, strict=True):
        assert response.status_code in (200, 400), (place, json.dumps(sent)[-400:], response.text)
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["message"] and "pydantic" not in error["message"], (place, error)
            assert path.startswith("/v1/messages") or error["param"], (place, error)
