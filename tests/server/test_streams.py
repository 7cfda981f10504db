"""Streams: the chunks of OpenAI, equal to the whole answer, alive in a long prefill, one error at most."""

import threading

import pytest

from tests.server.fakes import EOS, THINKING_TEMPLATE, ScriptEngine, parse_events, serving, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TEXT = "naïve 😀 <b>List<int></b>  two  spaces"


def text_of(chunks, index=0, field="content"):
    deltas = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get(field) or "" for c in deltas)


def test_chat_stream_shape():
    with serving() as client:
        chunks, done = client.stream(CHAT, messages=HI)
    assert done
    assert {(c["object"], c["model"], c["id"]) for c in chunks} == {("chat.completion.chunk", "toy", chunks[0]["id"])}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    last = chunks[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", EOS)
    assert [i for i, chunk in enumerate(chunks) if "ddtree" in chunk] == [len(chunks) - 1]
    assert not any("usage" in chunk for chunk in chunks)
    assert text_of(chunks) == "hello"


def test_completion_stream_shape():
    with serving() as client:
        chunks, done = client.stream(COMPLETIONS, prompt="hi")
    assert done and {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert chunks[-1]["choices"][0]["text"] == "" and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert "ddtree" in chunks[-1] and text_of(chunks) == "hello"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_chunk_is_the_last(path):
    fields = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    with serving() as client:
        chunks, done = client.stream(path, **fields, stream_options={"include_usage": True})
        whole = client.post(path, fields).json()
    assert done
    *others, last = chunks
    assert last["choices"] == [] and last["usage"] == whole["usage"] and last["ddtree"]["output_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in others)


@pytest.mark.parametrize("step_size", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("fields", [{}, {"stop": "spaces"}, {"stop": ["zzz", "</b>"]}, {"max_tokens": 9}], ids=str)
def test_deltas_concatenate_to_the_whole(step_size, fields):
    with serving(ScriptEngine(TEXT, step_size)) as client:
        whole = client.complete(return_token_ids=True, **fields).json()
        chunks, done = client.stream(COMPLETIONS, prompt="hi", return_token_ids=True, **fields)
    (choice,) = whole["choices"]
    assert done and text_of(chunks) == choice["text"]
    ids = [token for chunk in chunks for c in chunk["choices"] for token in c["token_ids"]]
    assert ids == choice["token_ids"]
    if "max_tokens" not in fields:
        assert "\N{REPLACEMENT CHARACTER}" not in choice["text"]


def test_only_a_beginning_of_a_stop_string_is_held_back():
    with serving(ScriptEngine("abxyabc", 1)) as client:
        chunks, _ = client.stream(COMPLETIONS, prompt="hi", stop="abc")
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts == ["abx", "y", ""]


@pytest.mark.parametrize("step_size", [1, 4])
def test_thought_streams_as_reasoning(step_size):
    with serving(ScriptEngine("why</think>\n\nyes", step_size), THINKING_TEMPLATE) as client:
        chunks, _ = client.stream(CHAT, messages=HI, stream_options={"include_usage": True})
        whole = client.chat().json()
    assert text_of(chunks, field="reasoning_content") == "why" and text_of(chunks) == "yes"
    assert chunks[-1]["usage"] == whole["usage"]


def test_choices_interleave():
    with serving() as client:
        chunks, done = client.stream(CHAT, messages=HI, n=3)
    assert done
    assert [text_of(chunks, index) for index in range(3)] == ["hello"] * 3
    closings = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert len(closings) == 3 and all("ddtree" in chunk["choices"][0] for chunk in closings)
    assert [("ddtree" in chunk) for chunk in closings] == [False, False, True]
    assert closings[-1]["ddtree"]["output_tokens"] == 18


def test_keep_alive_during_a_long_prefill():
    gate = threading.Event()
    with serving(ScriptEngine(gate=gate), keep_alive_s=0.02) as client:
        threading.Timer(0.3, gate.set).start()
        response = client.post(CHAT, {"messages": HI, "stream": True})
    assert ": keep-alive\n\n" in response.text
    chunks, done = parse_events(response.text)
    assert done and text_of(chunks) == "hello"


def test_validation_before_the_first_byte():
    with serving(ScriptEngine(refuse=ValueError("engine says no"))) as client:
        response = client.post(CHAT, {"messages": HI, "stream": True})
        assert response.status_code == 400 and "engine says no" in response.json()["error"]["message"]
        response = client.post(CHAT, {"messages": HI, "stream": True, "max_tokens": 0})
        assert response.status_code == 400


def test_a_fault_on_the_way_is_one_event_and_the_end():
    gate = threading.Event()
    with serving(ScriptEngine(gate=gate)) as client:
        client.engine.fail_next = "out of memory"
        gate.set()
        chunks, done = client.stream(CHAT, messages=HI)
        assert not done
        assert "out of memory" in chunks[-1]["error"]["message"]
        assert [chunk for chunk in chunks if "error" in chunk] == chunks[-1:]
        assert client.chat().status_code == 200
        wait_for(lambda: client.worker.num_running == 0)
