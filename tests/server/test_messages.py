"""/v1/messages and count_tokens: blocks and their events, in the words of Anthropic's clients; what is refused."""

import json

import pytest

from tests.server.fakes import ScriptEngine, serving
from tests.server.scripted import ROOMY, byte_server
from tests.server.test_tools import CALL, TOOLS_TEMPLATE, WEATHER

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}


def send(client, **fields):
    return client.post(PATH, {"messages": HI, "max_tokens": 400} | fields)


def events_of(client, **fields):
    response = send(client, **fields, stream=True)
    assert response.status_code == 200, response.text
    blocks = [block.split("\n", 1) for block in response.text.split("\n\n") if block.startswith("event: ")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [each["type"] for each in events]
    return events


def blocks_of(events):
    """The content that a client puts together."""
    content = []
    for each in events:
        if each["type"] == "content_block_start":
            content.append({**each["content_block"], "_json": ""})
        elif each["type"] == "content_block_delta":
            delta = each["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[
                delta["type"]
            ]
            content[each["index"]]["_json" if name == "partial_json" else name] += delta[name]
    for block in content:
        arguments = block.pop("_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return content


def without_ids(content):
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


@pytest.mark.parametrize("step_size", [1, 4, 500])
def test_thinking_text_and_tool_use(step_size):
    template = TOOLS_TEMPLATE + "<think>\n"
    with serving(ScriptEngine(f"hm</think>\n\nSure.\n{CALL}", step_size), template, facts=ROOMY) as client:
        whole = send(
            client, tools=[TOOL], system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        ).json()
        events = events_of(client, tools=[TOOL])
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "tool_use")
    thinking, text, use = whole["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "Sure.")
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_weather", {"city": "Rom", "unit": "c"})
    assert without_ids(blocks_of(events)) == without_ids(whole["content"])
    assert events[0]["type"] == "message_start" and events[0]["message"]["usage"]["input_tokens"] > 0
    assert [each["type"] for each in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == whole["ddtree"]["output_tokens"]
    assert sum(each["type"] == "content_block_stop" for each in events) == 3


STOPS = [
    ({}, "hello", "end_turn", None),
    ({"max_tokens": 3}, "hel", "max_tokens", None),
    ({"stop_sequences": ["x", "lo"]}, "hel", "stop_sequence", "lo"),
]


@pytest.mark.parametrize(("fields", "text", "reason", "sequence"), STOPS, ids=str)
def test_stop_reasons(fields, text, reason, sequence):
    with serving(ScriptEngine("hello")) as client:
        body = send(client, **fields).json()
        events = events_of(client, **fields)
    assert body["content"] == [{"type": "text", "text": text}] == blocks_of(events)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_conversation_is_rendered_and_counted_alike():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rom"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "21 degrees"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    with serving(ScriptEngine("warm"), facts=ROOMY) as client:
        body = {"messages": messages, "system": "Rules.", "tools": [TOOL]}
        answer = client.post(PATH, body | {"max_tokens": 9}).raise_for_status().json()
        prompt = bytes(client.engine.added[-1].prompt_token_ids).decode()
        counted = client.post(f"{PATH}/count_tokens", body).raise_for_status().json()
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]} == {"input_tokens": len(prompt.encode())}
    places = [prompt.index(text) for text in ("Rules.", "weather?", "Wait.", "21 degrees", "And?")]
    assert places == sorted(places)


def test_demanded_tools_at_every_budget():
    with byte_server("right") as client:
        for choice in ({"type": "tool", "name": "get_weather"}, {"type": "any", "disable_parallel_tool_use": True}):
            fields = {"tools": [TOOL], "tool_choice": choice, "seed": 2}
            answers = [send(client, **fields, tree_budget=budget).raise_for_status().json() for budget in (0, 16)]
            assert without_ids(answers[0]["content"]) == without_ids(answers[1]["content"])
            (use,) = answers[0]["content"]
            assert use["input"]["unit"] in ("c", "f") and answers[0]["stop_reason"] == "tool_use"
        assert (
            send(client, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=3).json()["content"][0]["type"]
            == "text"
        )


def test_key_in_either_header():
    with serving(api_key="k") as client:
        body = {"messages": HI, "max_tokens": 2}
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "no"}, 401),
            ({"x-api-key": "k"}, 200),
            ({"Authorization": "Bearer k"}, 200),
        ):
            response = client.post(PATH, body, headers=headers)
            assert response.status_code == status
            if status == 401:
                assert response.json()["type"] == "error" and response.json()["error"]["type"] == "authentication_error"


def test_a_fault_on_the_way():
    with serving(ScriptEngine("hello")) as client:
        client.engine.fail_next = "out of memory"
        events = events_of(client)
    assert events[-1]["type"] == "error" and "out of memory" in events[-1]["error"]["message"]


BAD = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [*HI, {"role": "assistant", "content": "{"}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "best"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type: this model's chat template knows no thinking; leave it out or send disabled"),
    ({"thinking": {"type": "disabled", "budget_tokens": "many"}}, "thinking.budget_tokens: must be an integer"),
    ({"thinking": {"type": "disabled", "budget_tokens": 0}}, "thinking.budget_tokens: must be at least 1"),
    ({"tools": [{"name": "x y", "input_schema": {}}]}, "tools[0].name: must be a string that matches"),
    ({"tools": [{"name": "x", "input_schema": 5}]}, "tools[0].input_schema: must be an object, got 5"),
    ({"top_logprobs": 3}, "log-probabilities come with"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text: must be a string, got 5"),
    ({"thinking": {"type": "maybe"}}, "thinking"),
    ({"thinking": {"type": []}}, "thinking"),
    ({"tools": [TOOL], "tool_choice": {"type": {}}}, "tool_choice"),
    ({"temperature": 3}, "temperature"),
    ({"stop": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences: "),
]


@pytest.mark.parametrize(("fields", "name"), BAD, ids=str)
def test_refused_by_name(fields, name):
    with serving() as client:
        response = send(client, **fields)
    assert response.status_code == 400 and response.json()["type"] == "error"
    assert name in response.json()["error"]["message"]
