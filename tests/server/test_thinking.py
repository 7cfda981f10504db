"""Thought and answer with Qwen's own templates and tokenizer, whole and streamed, however the tokens arrive."""

import itertools
import json
from dataclasses import replace

import pytest

from ddtree.text import Tokenizer, render_chat
from tests.server.fakes import FACTS, THINKING_TEMPLATE, ScriptEngine, serving
from tests.server.scripted import DRAFTERS, byte_server
from tests.text.conftest import CHATML

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QWEN_FACTS = replace(FACTS, vocab_size=151_936, max_context=2048)
ASK = {"role": "user", "content": "What is 2 + 2?"}
THINK_END = 151_668
THOUGHT, ANSWER = "Two 🙂 and\n\ntwo: 四 <b>", "Four 👩‍👩‍👧, List<int>.\n"
THINKS = [{}, {"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": "true"}, "enable_thinking": False}]
SILENT = [{"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": "False"}, "enable_thinking": True}]
# What the model writes: with Qwen3 it opens the thought itself, with Qwen3.5 the prompt has done so.
WRITES = {"qwen3": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", "qwen3_5": f"{THOUGHT}\n</think>\n\n{ANSWER}"}


def speaking(tokenizer, script, step_size=3):
    """A server whose model says `script` (text or ids) and ends its turn."""
    ids = tokenizer.encode(script, add_special_tokens=False) if isinstance(script, str) else list(script)
    (eos,) = tokenizer.eos_token_ids
    return serving(ScriptEngine([*ids, eos], step_size), facts=QWEN_FACTS, tokenizer=tokenizer)


def whole(client, **fields):
    """Thought, answer, finish reason and reasoning tokens of a whole answer."""
    body = client.post(CHAT, {"messages": [ASK], **fields}).json()
    (choice,) = body["choices"]
    message, usage = choice["message"], body["usage"]
    count = usage["completion_tokens_details"]["reasoning_tokens"]
    assert count <= usage["completion_tokens"] == body["ddtree"]["output_tokens"]
    return message["reasoning_content"], message["content"], choice["finish_reason"], count


def streamed(client, **fields):
    """The same of a stream; thoughts come before answers."""
    fields = {"messages": [ASK], "stream_options": {"include_usage": True}, **fields}
    chunks, done = client.stream(CHAT, **fields)
    *chunks, usage = chunks
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    kinds = [kind for delta in deltas[1:] for kind in delta]
    assert done and kinds == sorted(kinds, reverse=True) and all(delta.values() for delta in map(dict, deltas[1:-1]))
    reasoning, content = ("".join(delta.get(kind, "") for delta in deltas) for kind in ("reasoning_content", "content"))
    count = usage["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return reasoning or None, content, choices[-1]["finish_reason"], count


@pytest.fixture(params=["qwen3", "qwen3_5"])
def family(request) -> str:
    return request.param


@pytest.fixture
def tokenizer(request, family) -> Tokenizer:
    return request.getfixturevalue(family)


@pytest.mark.parametrize("step_size", [1, 2, 3, 1000])
def test_thought_and_answer(tokenizer, family, step_size):
    text = WRITES[family]
    count = tokenizer.encode(text).index(THINK_END) + 1
    with speaking(tokenizer, text, step_size) as client:
        for fields in THINKS:
            assert whole(client, **fields) == (THOUGHT, ANSWER, "stop", count)
            assert streamed(client, **fields) == (THOUGHT, ANSWER, "stop", count)


@pytest.mark.parametrize("text", [ANSWER, "\n<think>quoted</think>\n", "say </think>"])
def test_thinking_off(tokenizer, text):
    """The prompt has closed an empty thought: whatever follows is the answer, as it is."""
    with speaking(tokenizer, text) as client:
        for fields in SILENT:
            assert whole(client, **fields) == (None, text, "stop", 0)
            assert streamed(client, **fields) == (None, text, "stop", 0)


@pytest.mark.parametrize("step_size", [1, 2, 5])
def test_a_thought_that_max_tokens_cut(tokenizer, family, step_size):
    text = WRITES[family]
    count = tokenizer.encode(text).index(THINK_END) + 1
    with speaking(tokenizer, text, step_size) as client:
        for n in range(1, count + 2):  # the last one brings the newlines after the tag
            reasoning, content, reason, num_reasoning = whole(client, max_tokens=n)
            assert (content, reason, num_reasoning) == ("", "length", min(n, count))
            # A character of several tokens may be cut as well.
            assert THOUGHT.startswith((reasoning or "").rstrip("\N{REPLACEMENT CHARACTER}"))
            if n >= count:
                assert reasoning == THOUGHT
            assert streamed(client, max_tokens=n) == (reasoning, content, reason, num_reasoning)


@pytest.mark.parametrize("step_size", [1, 3])
def test_an_end_tag_spelled_out(tokenizer, family, step_size):
    """Models also write the tag in pieces, letters instead of its own token."""
    before, after = WRITES[family].split("</think>")
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in (before, "</", "think", ">", after)]
    count = sum(map(len, parts[:4]))
    assert THINK_END not in itertools.chain(*parts)
    with speaking(tokenizer, itertools.chain(*parts), step_size) as client:
        assert whole(client) == streamed(client) == (THOUGHT, ANSWER, "stop", count)
        # Cut after "</": no tag, so part of the thought, and given out at the end.
        cut = {"max_tokens": count - 2}
        assert whole(client, **cut) == streamed(client, **cut) == (f"{THOUGHT}\n</", "", "length", count - 2)


def test_tokens_before_the_tag_are_no_thought(qwen3):
    with speaking(qwen3, "\n\n<think>hm</think>yes", 2) as client:
        assert whole(client) == streamed(client) == ("hm", "yes", "stop", 3)


def test_an_empty_thought_of_the_models_own(qwen3):
    """`/no_think` in a message: Qwen3 writes the empty thought itself."""
    with speaking(qwen3, "<think>\n\n</think>\n\nFour.") as client:
        assert whole(client) == streamed(client) == (None, "Four.", "stop", 3)


def test_no_thought_though_thinking_is_on(qwen3):
    with speaking(qwen3, " Four.\n") as client:
        assert whole(client) == streamed(client) == (None, " Four.\n", "stop", 0)


@pytest.mark.parametrize("step_size", [1, 2, 7])
def test_stops_and_thoughts(tokenizer, family, step_size):
    ids = tokenizer.encode(WRITES[family])
    with speaking(tokenizer, ids, step_size) as client:
        # In the thought, at its end tag, and held back across it without ever matching.
        assert whole(client, stop="two:")[:3] == ("Two 🙂 and", "", "stop")
        assert whole(client, stop="</think>")[:3] == (THOUGHT, "", "stop")
        for stop in ("</think>\n\nFive", "\n\nFour 👩!"):
            assert whole(client, stop=stop) == (THOUGHT, ANSWER, "stop", ids.index(THINK_END) + 1)
        assert whole(client, stop_token_ids=[THINK_END]) == (THOUGHT, "", "stop", ids.index(THINK_END))
        for fields in ({"stop": "two:"}, {"stop": "</think>"}, {"stop_token_ids": [THINK_END]}):
            assert streamed(client, **fields) == whole(client, **fields)


def test_several_choices_each_think(tokenizer, family):
    count = tokenizer.encode(WRITES[family]).index(THINK_END) + 1
    with speaking(tokenizer, WRITES[family]) as client:
        body = client.post(CHAT, {"messages": [ASK], "n": 3}).json()
    messages = [choice["message"] for choice in body["choices"]]
    assert [(m["reasoning_content"], m["content"]) for m in messages] == [(THOUGHT, ANSWER)] * 3
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 * count}


def test_a_raw_completion_is_left_alone(tokenizer, family):
    with speaking(tokenizer, WRITES[family], 2) as client:
        body = client.post(COMPLETIONS, {"prompt": "<think>\n"}).json()
        chunks, _ = client.stream(COMPLETIONS, prompt="<think>\n")
    assert body["choices"][0]["text"] == WRITES[family] == "".join(c["choices"][0]["text"] for c in chunks)
    assert "completion_tokens_details" not in body["usage"]


@pytest.mark.parametrize("fields", [*THINKS, *SILENT], ids=str)
def test_a_conversation_drops_its_earlier_thoughts(tokenizer, family, fields):
    """Answers go back as they came, thought and all; the next prompt is the one that transformers makes of them."""
    messages, thinks = [ASK], fields in THINKS
    with speaking(tokenizer, WRITES[family] if thinks else ANSWER) as client:
        for turn in range(3):
            body = client.post(CHAT, {"messages": messages, **fields}).json()
            prompt = list(client.engine.added[-1].prompt_token_ids)
            reference = tokenizer.pretrained.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, enable_thinking=thinks
            )
            assert prompt == reference and body["usage"]["prompt_tokens"] == len(reference)
            assert client.post("/tokenize", {"messages": messages, **fields}).json()["tokens"] == reference
            text = tokenizer.decode(prompt)
            assert THOUGHT not in text and text.count("Four") == turn
            messages = [*messages, body["choices"][0]["message"], {"role": "user", "content": f"And {turn} + 3?"}]


def test_a_thought_inline_is_dropped_as_well(tokenizer, family):
    with speaking(tokenizer, WRITES[family]) as client:
        histories = [
            [ASK, {"role": "assistant", "content": WRITES[family]}, ASK],
            [ASK, {"role": "assistant", "content": [{"type": "text", "text": WRITES[family]}]}, ASK],
            [ASK, {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}, ASK],
        ]
        for messages in histories:
            assert client.post(CHAT, {"messages": messages}).status_code == 200
        prompts = {request.prompt_token_ids for request in client.engine.added}
    assert len(prompts) == 1
    assert tokenizer.decode(prompts.pop()).count("<think>") == (family == "qwen3_5")


def test_a_template_without_thinking(qwen3):
    plain = Tokenizer(qwen3.pretrained)
    plain.chat_template_for = lambda tools: CHATML
    with speaking(plain, "<think>a</think>b") as client:
        message = client.post(CHAT, {"messages": [ASK], "enable_thinking": "false"}).json()["choices"][0]["message"]
        assert message["content"] == "<think>a</think>b" and "reasoning_content" not in message
        assert list(client.engine.added[-1].prompt_token_ids) == plain.encode(render_chat(plain, [ASK]))
        for fields, param in (
            ({"enable_thinking": True}, "enable_thinking"),
            ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ):
            response = client.post(CHAT, {"messages": [ASK], **fields})
            assert response.status_code == 400 and response.json()["error"]["param"] == param
            assert "knows no thinking" in response.json()["error"]["message"]


def test_a_thought_that_is_no_text_is_refused():
    with serving(template=THINKING_TEMPLATE) as client:
        messages = [ASK, {"role": "assistant", "content": "a", "reasoning_content": {"text": "b"}}, ASK]
        error = client.post(CHAT, {"messages": messages}).json()["error"]
    assert error["param"] == "messages[1].reasoning_content" and "must be a string or null" in error["message"]


@pytest.mark.parametrize("field", ["reasoning_effort", "reasoning", "thinking"])
def test_other_switches_point_to_the_one_there_is(field):
    with serving(template=THINKING_TEMPLATE) as client:
        error = client.chat(**{field: "low"}).json()["error"]
    assert error["param"] == field and "enable_thinking" in error["message"]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_thinking_budget_ends_the_thought_at_every_tree_budget(drafter):
    """The wild law never closes a thought of itself; where the budget does, an answer follows, the same with trees."""
    with byte_server(drafter, template=THINKING_TEMPLATE) as client:
        fields = {"max_tokens": 60, "temperature": 0.8, "seed": 4, "thinking_budget": 20}
        plain = client.chat("hi", **fields, tree_budget=0).raise_for_status().json()
        message, usage = plain["choices"][0]["message"], plain["usage"]
        assert message["reasoning_content"] and message["content"]
        assert 20 <= usage["completion_tokens_details"]["reasoning_tokens"] <= 20 + len("xxx\n</think>")
        for budget in (1, 16, 64):
            tree = client.chat("hi", **fields, tree_budget=budget).raise_for_status().json()
            assert tree["choices"] == plain["choices"] and tree["usage"] == usage, budget
            assert drafter != "right" or budget == 1 or tree["ddtree"]["mean_acceptance_length"] > 2
        roomy = client.chat("hi", **(fields | {"thinking_budget": 500}), tree_budget=16).json()["choices"][0]
        free = client.chat("hi", **(fields | {"thinking_budget": None}), tree_budget=0).json()["choices"][0]
        assert roomy == free and free["message"]["reasoning_content"].startswith(message["reasoning_content"].rstrip("\ufffd"))


def test_a_thinking_budget_with_a_schema_behind_it_and_in_the_other_api():
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    with byte_server("some", template=THINKING_TEMPLATE) as client:
        fields = {"max_tokens": 80, "seed": 2, "thinking_budget": 12, "response_format": schema, "n": 2}
        answers = [client.chat("hi", **fields, tree_budget=budget).raise_for_status().json()["choices"] for budget in (0, 16)]
        plain, tree = ([choice["message"] for choice in choices] for choices in answers)
        assert plain == tree and all(json.loads(message["content"]) in ("yes", "no") for message in plain)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 4, "tree_budget": 16}
        body["thinking"] = {"type": "enabled", "budget_tokens": 20}
        blocks = client.post("/v1/messages", body).raise_for_status().json()["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"] and len(blocks[0]["thinking"]) <= 23


def test_a_thinking_budget_where_there_is_no_thought(tokenizer, family):
    with speaking(tokenizer, ANSWER) as client:
        assert whole(client, enable_thinking=False, thinking_budget=1)[1] == ANSWER
