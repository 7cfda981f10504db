"""Whose prompts are shared: `cache_salt` and `cache_prompt` reach the engine, on every API."""

import pytest

from ddtree.server.chat import ChatRequest
from ddtree.server.text import Text
from tests.server.fakes import ScriptEngine, serving

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "salt"),
    [
        ({}, ""),
        ({"cache_salt": "team-7"}, "team-7"),
        ({"cache_prompt": True, "cache_salt": "a"}, "a"),
        ({"cache_prompt": False}, None),
        ({"cache_prompt": False, "cache_salt": "a"}, None),
    ],
)
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}),
    ],
)
def test_salts(route, body, fields, salt):
    with serving(ScriptEngine()) as client:
        response = client.post(route, {"model": "x", **body, **fields})
        assert response.status_code == 200, response.text
        assert client.engine.added[-1].cache_salt == salt


@pytest.mark.parametrize("fields", [{"cache_salt": 7}, {"cache_salt": "x" * 300}, {"cache_prompt": "no"}])
def test_wrong_ones_are_named(fields):
    with serving(ScriptEngine()) as client:
        response = client.post("/v1/chat/completions", {"messages": HI, **fields})
        assert response.status_code == 400 and response.json()["error"]["param"] in fields


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("tokenizer", ["qwen3", "qwen3_5"])
def test_the_end_of_the_last_message_begins_the_next_turn(request, tokenizer, thinking):
    """With a thought opened at the end, or one that the next turn leaves out, two turns part right behind it."""
    text = Text(request.getfixturevalue(tokenizer))
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a mill?"}]
    first = text.chat(ChatRequest(model="x", messages=messages, enable_thinking=thinking))
    messages += [{"role": "assistant", "content": "A machine."}, {"role": "user", "content": "Why?"}]
    second = text.chat(ChatRequest(model="x", messages=messages, enable_thinking=thinking))
    (end,) = first.boundaries
    assert len(first.token_ids) - 12 < end < len(first.token_ids)
    assert second.token_ids[:end] == first.token_ids[:end]
    assert second.boundaries[0] > end
