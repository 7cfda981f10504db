"""/v1/responses: typed events in rising order whose pieces make the whole; items, calls, formats; what is refused."""

import json

import pytest

from tests.server.fakes import THINKING_TEMPLATE, ScriptEngine, serving
from tests.server.scripted import ROOMY, byte_server
from tests.server.test_tools import CALL, TOOLS_TEMPLATE, WEATHER

TOOL = {"type": "function", **WEATHER["function"]}
PATH = "/v1/responses"


def events_of(client, **fields):
    response = client.post(PATH, {**fields, "stream": True})
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n", 1)
            events.append(json.loads(data.removeprefix("data: ")))
            assert events[-1]["type"] == name.removeprefix("event: ")
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


def without_ids(output):
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


@pytest.mark.parametrize("step_size", [1, 3, 500])
def test_text(step_size):
    with serving(ScriptEngine("hello", step_size)) as client:
        whole = client.post(PATH, {"input": "hi", "instructions": "be brief", "max_output_tokens": 9}).json()
        events = events_of(client, input="hi", instructions="be brief", max_output_tokens=9)
        prompt = bytes(client.engine.added[-1].prompt_token_ids).decode()
    assert prompt.startswith("system: be brief\nuser: hi\n")
    assert (whole["object"], whole["status"], whole["model"]) == ("response", "completed", "toy")
    (item,) = whole["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
    assert whole["usage"]["output_tokens"] == 6 == whole["ddtree"]["output_tokens"]
    names = [each["type"] for each in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta") == "hello"
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"]) and final["usage"] == whole["usage"]
    assert final["output"][0]["id"] == events[2]["item"]["id"]


@pytest.mark.parametrize("step_size", [1, 4, 500])
def test_thought_then_text_then_call(step_size):
    template = TOOLS_TEMPLATE + "<think>\n"
    with serving(ScriptEngine(f"hm</think>\n\nSure.\n{CALL}", step_size), template, facts=ROOMY) as client:
        fields = {"input": "hi", "tools": [TOOL], "tool_choice": "auto"}
        whole = client.post(PATH, fields).json()
        events = events_of(client, **fields)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    call = whole["output"][2]
    assert call["name"] == "get_weather" and json.loads(call["arguments"]) == {"city": "Rom", "unit": "c"}
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    deltas = [each["delta"] for each in events if each["type"] == "response.function_call_arguments.delta"]
    (done,) = (each for each in events if each["type"] == "response.function_call_arguments.done")
    assert "".join(deltas) == done["arguments"] == call["arguments"]
    added = [each for each in events if each["type"] == "response.output_item.added"]
    assert [each["output_index"] for each in added] == [0, 1, 2]
    assert [each["item"]["id"] for each in added] == [item["id"] for item in events[-1]["response"]["output"]]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_cut_off():
    with serving(ScriptEngine("hello")) as client:
        whole = client.post(PATH, {"input": "hi", "max_output_tokens": 3}).json()
        events = events_of(client, input="hi", max_output_tokens=3)
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])


def test_conversation_with_calls():
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rom"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "21 degrees"},
    ]
    with serving(ScriptEngine("warm"), facts=ROOMY) as client:
        assert client.post(PATH, {"input": items, "tools": [TOOL], "store": False}).status_code == 200
        prompt = bytes(client.engine.added[-1].prompt_token_ids).decode()
    assert prompt.index("Rules.") < prompt.index("weather?") < prompt.index("assistant: Wait.")
    assert prompt.index("Wait.") < prompt.rindex('{"name": "get_weather", "arguments": {"city": "Rom"}}')
    assert "<tool_response>\n21 degrees\n</tool_response>" in prompt


def test_schema_and_demanded_call_hold_at_every_budget():
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "t", "schema": schema, "strict": True}}
    named = {"type": "function", "name": "get_weather"}
    with byte_server("right") as client:
        for fields in ({"text": text}, {"tools": [TOOL], "tool_choice": named}):
            body = {"input": "hi", "seed": 3, "max_output_tokens": 300, **fields}
            answers = [client.post(PATH, body | {"tree_budget": b}).raise_for_status().json() for b in (0, 16)]
            outputs = [without_ids(answer["output"]) for answer in answers]
            assert outputs[0] == outputs[1] and answers[1]["ddtree"]["mean_acceptance_length"] > 1.5
            item = answers[0]["output"][0]
            value = json.loads(item["content"][0]["text"] if "text" in fields else item["arguments"])
            assert value["a"] in ("x", "y") if "text" in fields else value["unit"] in ("c", "f")


def test_thinking_is_switched_by_effort():
    with serving(ScriptEngine("hello"), THINKING_TEMPLATE) as client:
        kinds = {}
        for effort in ("medium", "none"):
            output = client.post(PATH, {"input": "hi", "reasoning": {"effort": effort}}).json()["output"]
            kinds[effort] = [item["type"] for item in output]
    assert kinds == {"medium": ["reasoning"], "none": ["message"]}


def test_a_fault_on_the_way():
    with serving(ScriptEngine("hello")) as client:
        client.engine.fail_next = "out of memory"
        events = events_of(client, input="hi")
    assert events[-1]["type"] == "response.failed" and "out of memory" in events[-1]["response"]["error"]["message"]


BAD = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "content"),
    ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "hi", "background": True}, "background"),
    ({"input": "hi", "include": ["message.output_text.logprobs"]}, "include"),
    ({"input": "hi", "truncation": "auto"}, "truncation"),
    ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools"),
    ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "hi", "max_tokens": 5}, "max_tokens"),
    ({"input": "hi", "temperature": 3}, "temperature"),
    ({"input": "hi", "reasoning": {"effort": "high"}}, "reasoning"),
    (
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "t", "schema": {"type": "no"}}}},
        "text.format: no grammar can be made of it",
    ),
    ({"input": "hi", "text": {"format": {"type": "yaml"}}}, "text.format.type: must be 'text', 'json_object' or 'json_schema'"),
    ({"input": "hi", "text": {"format": {"type": "json_schema", "name": 5}}}, "text.format.name: must be a string, got 5"),
    ({"input": "hi", "top_logprobs": 3}, "log-probabilities come with"),
    ({"input": "hi", "response_format": {"type": "json_object"}}, "use text.format"),
    ({"input": "hi", "max_tokens": 5}, "use max_output_tokens"),
    ({"input": "x" * 600}, "this server's context is 512 tokens"),
    ({"input": "hi", "max_output_tokens": 600}, "lower max_output_tokens to"),
    ({"input": "hi", "instructions": "be", "tools": [{"type": "function", "name": 5}]}, "tools[0].name: must be a string, got 5"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": 5}]}, "input[0].name: must be a string, got 5"),
    ({"input": "hi", "tool_choice": "required"}, "tool_choice"),
    ({"input": "hi", "reasoning": {"effort": []}}, "reasoning"),
    ({"input": [{"type": "reasoning", "content": 3}]}, "content"),
    ({"input": [{"type": "reasoning", "content": [{"text": 3}]}]}, "content"),
]


@pytest.mark.parametrize(("fields", "name"), BAD, ids=str)
def test_refused_by_name(fields, name):
    with serving() as client:
        response = client.post(PATH, fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert name in error["message"] and error["param"]
    # Chat's names for things are not this API's.
    assert error["param"] in fields or not error["param"].startswith(("response_format", "max_completion_tokens", "messages"))
