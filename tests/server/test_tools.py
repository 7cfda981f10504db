"""Tools over HTTP: calls in the answer, whole and streamed; demanded calls come whatever the model would rather say."""

import json

import pytest

from tests.server.fakes import PLAIN_TEMPLATE, ScriptEngine, serving
from tests.server.scripted import ROOMY, byte_server

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rom", "Ulm"]},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom", "unit": "c"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRom\n</parameter>\n<parameter=unit>\nc\n</parameter>\n"
    "</function>\n</tool_call>"
)
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}" + PLAIN_TEMPLATE
XML_TEMPLATE = "{% if tools %}{{ tools | tojson }} <tool_call> <function=x>{% endif %}" + PLAIN_TEMPLATE
FORMS = {
    "hermes": (TOOLS_TEMPLATE, CALL),
    "xml": (XML_TEMPLATE, XML_CALL),
    "no place in the template": (PLAIN_TEMPLATE, CALL),
}
HI = [{"role": "user", "content": "hi"}]


def gathered(chunks):
    """Content, calls and finish reason of a stream, as clients put them together."""
    content, calls, finish = "", [], None
    for chunk in chunks:
        for part in chunk["choices"]:
            content += part["delta"].get("content") or ""
            finish = part["finish_reason"] or finish
            for delta in part["delta"].get("tool_calls", ()):
                if delta["index"] == len(calls):
                    calls.append({"id": delta["id"], "type": delta["type"], "function": {"name": "", "arguments": ""}})
                for name, text in delta["function"].items():
                    calls[delta["index"]]["function"][name] += text
    return content, calls, finish


@pytest.mark.parametrize("step_size", [1, 4, 500])
@pytest.mark.parametrize(("template", "call"), FORMS.values(), ids=FORMS)
def test_calls_whole_and_streamed(template, call, step_size):
    with serving(ScriptEngine(f"Let me see.\n{call}\n{call}", step_size), template, facts=ROOMY) as client:
        choice = client.chat(tools=[WEATHER, NOW], tool_choice="auto").json()["choices"][0]
        chunks, done = client.stream("/v1/chat/completions", messages=HI, tools=[WEATHER, NOW])
        prompt = bytes(client.engine.added[-1].prompt_token_ids).decode()
    message = choice["message"]
    assert message["content"] == "Let me see." and choice["finish_reason"] == "tool_calls"
    for found in message["tool_calls"]:
        assert found["type"] == "function" and found["id"].startswith("call_")
        assert found["function"]["name"] == "get_weather"
        assert json.loads(found["function"]["arguments"]) == {"city": "Rom", "unit": "c"}
    assert len({found["id"] for found in message["tool_calls"]}) == 2
    content, calls, finish = gathered(chunks)
    assert done and (content, finish) == ("Let me see.", "tool_calls")
    assert [each["function"] for each in calls] == [each["function"] for each in message["tool_calls"]]
    assert '"get_weather"' in prompt and '"now"' in prompt


def test_only_a_call_has_null_content():
    with serving(ScriptEngine(CALL), TOOLS_TEMPLATE, facts=ROOMY) as client:
        message = client.chat(tools=[WEATHER]).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_cut_off_inside_a_call():
    with serving(ScriptEngine(CALL), TOOLS_TEMPLATE, facts=ROOMY) as client:
        choice = client.chat(tools=[WEATHER], max_tokens=70).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "Rom"')


def test_without_tools_the_tags_are_text():
    with serving(ScriptEngine(CALL), TOOLS_TEMPLATE, facts=ROOMY) as client:
        for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
            choice = client.chat(**fields).json()["choices"][0]
            assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
            assert "tool_calls" not in choice["message"]
        assert "get_weather" not in bytes(client.engine.added[-1].prompt_token_ids).decode()


@pytest.mark.parametrize("template", [TOOLS_TEMPLATE, XML_TEMPLATE, PLAIN_TEMPLATE], ids=["hermes", "xml", "no place"])
@pytest.mark.parametrize("drafter", ["right", "EOS everywhere"])
def test_demanded_calls_at_every_budget(template, drafter):
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields = {"tools": [WEATHER, NOW], "max_tokens": 300, "temperature": 0.8, "seed": 3}
    with byte_server(drafter, template=template) as client:
        for choice in (named, "required"):
            only = {"parallel_tool_calls": False} if choice == "required" else {}
            plain = client.chat("hi", **fields, **only, tool_choice=choice, tree_budget=0).raise_for_status().json()
            tree = client.chat("hi", **fields, **only, tool_choice=choice, tree_budget=16).raise_for_status().json()
            (call,) = plain["choices"][0]["message"]["tool_calls"]
            assert plain["choices"][0]["finish_reason"] == "tool_calls"
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "get_weather":
                assert (
                    list(arguments) == ["city", "unit"]
                    and arguments["unit"] in ("c", "f")
                    and len(arguments["city"]) <= 3
                )
            else:
                assert choice == "required" and arguments == {}
            assert tree["choices"][0]["message"]["tool_calls"][0]["function"] == call["function"]
            assert tree["usage"] == plain["usage"] and tree["ddtree"]["mode"] == "ddtree"
            if drafter == "right":
                assert tree["ddtree"]["mean_acceptance_length"] > 2


def test_several_demanded_calls_and_strict_ones():
    fields = {"tools": [NOW], "temperature": 1.5, "max_tokens": 300, "logit_bias": {"10": 2}}
    with byte_server("right", template=TOOLS_TEMPLATE) as client:
        numbers = set()
        for seed in range(8):
            message = client.chat("hi", **fields, tool_choice="required", seed=seed).json()["choices"][0]["message"]
            numbers.add(len(message["tool_calls"]))
            assert {call["function"]["name"] for call in message["tool_calls"]} == {"now"}
        assert max(numbers) > 1
        strict = {"type": "function", "function": NOW["function"] | {"strict": True}}
        answer = client.chat("hi", tools=[strict], tool_choice="auto", max_tokens=20, seed=1)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]


def test_history_with_calls_and_results_is_rendered():
    history = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "21 degrees"}]},
    ]
    with serving(ScriptEngine("warm"), PLAIN_TEMPLATE, facts=ROOMY) as client:
        for tools in ([], [WEATHER]):
            response = client.post("/v1/chat/completions", {"messages": history, "tools": tools})
            assert response.json()["choices"][0]["message"]["content"] == "warm"
            prompt = bytes(client.engine.added[-1].prompt_token_ids).decode()
            assert "<tool_response>\n21 degrees\n</tool_response>" in prompt and '<tool_call>\n{"name": "f"' in prompt
        counted = client.post("/tokenize", {"messages": history, "tools": [WEATHER]}).json()
        assert counted["count"] == len(prompt.encode())


BAD = [
    {"tool_choice": "required"},
    {"tool_choice": "any", "tools": [NOW]},
    {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [NOW]},
    {"tools": [NOW, NOW]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tools": [NOW], "tool_choice": "required", "ignore_eos": True},
    {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}],
        "tool_choice": "required",
    },
    {"functions": [{"name": "f"}]},
    {"function_call": "auto"},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_bad_tools_are_named(fields):
    with serving() as client:
        response = client.chat(**fields)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert any(name in message for name in fields)
