"""Structured output: what comes is what the schema allows, the same at every budget, with trees at work."""

import json

import numpy as np
import pytest

from tests.server.fakes import EOS, THINKING_TEMPLATE, ScriptEngine, serving
from tests.server.scripted import DRAFTERS, byte_server

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 4}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "größe", 7, None]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "address": ADDRESS,
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "age", "address", "flags"],
    "additionalProperties": False,
}
# Between tokens JSON allows white space, which the wild law would write for long.
NO_SPACE = {str(byte): -100 for byte in b" \n\r\t"}


def wanted(schema):
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}


def check(value):
    assert list(value) == ["kind", "age", "address", "flags"]
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"] and 0 <= value["age"] <= 150
    assert (
        len(value["address"]["zip"]) == 5 and value["address"]["zip"].isdigit() and len(value["address"]["street"]) <= 4
    )
    assert 1 <= len(value["flags"]) <= 3 and all(isinstance(flag, bool) for flag in value["flags"])


@pytest.fixture(scope="module", params=DRAFTERS)
def client(request):
    with byte_server(request.param) as client:
        client.drafter = request.param
        yield client


def test_json_schema_at_every_budget(client):
    fields = {"response_format": wanted(SCHEMA), "max_tokens": 300, "temperature": 1.0, "seed": 1, "logprobs": True}
    fields["logit_bias"] = NO_SPACE
    plain = client.chat("hi", **fields, tree_budget=0).raise_for_status().json()
    choice = plain["choices"][0]
    assert choice["finish_reason"] == "stop"
    check(json.loads(choice["message"]["content"]))
    for budget in (1, 16, 64) if client.drafter == "right" else (16,):
        answer = client.chat("hi", **fields, tree_budget=budget).raise_for_status().json()
        assert answer["choices"] == plain["choices"] and answer["usage"] == plain["usage"], budget
        assert answer["ddtree"]["mode"] == "ddtree"
        if client.drafter == "right" and budget > 1:
            assert answer["ddtree"]["mean_acceptance_length"] > 2
        if client.drafter == "wrong":
            # What the grammar forbids is not worth a row of the verify.
            assert answer["ddtree"]["nodes_verified"] < answer["ddtree"]["decode_rounds"] * budget


def test_streamed_and_several_choices():
    with byte_server("some") as client:
        check_streamed_choices(client)


def check_streamed_choices(client):
    fields = {"response_format": wanted(SCHEMA), "max_tokens": 300, "temperature": 1.0, "seed": 5, "n": 3}
    fields["logit_bias"] = NO_SPACE
    whole = client.chat("hi", **fields, tree_budget=16).raise_for_status().json()
    chunks, done = client.stream(
        "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **fields, tree_budget=16
    )
    assert done
    texts = ["", "", ""]
    for chunk in chunks:
        for part in chunk["choices"]:
            texts[part["index"]] += part["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]] and len(set(texts)) == 3
    for text in texts:
        check(json.loads(text))


def test_json_object_and_completions(client):
    schema = {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 2, "maxItems": 2}
    body = {"prompt": "x", "response_format": wanted(schema), "max_tokens": 60, "tree_budget": 16}
    value = json.loads(client.post("/v1/completions", body).raise_for_status().json()["choices"][0]["text"])
    assert len(value) == 2 and set(value) <= {"a", 1}
    content = client.chat("hi", response_format={"type": "json_object"}, max_tokens=20).json()["choices"][0]["message"][
        "content"
    ]
    assert content.lstrip().startswith("{")


def test_penalties_and_bias_within_the_grammar(client):
    schema = {
        "type": "object",
        "properties": {"x": {"enum": ["aaaa", "bbbb"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    fields = {"response_format": wanted(schema), "max_tokens": 80, "temperature": 0, "logit_bias": {str(ord("b")): 100}}
    plain = client.chat("hi", **fields, presence_penalty=1.0, tree_budget=0).json()["choices"]
    assert json.loads(plain[0]["message"]["content"]) == {"x": "bbbb"}
    assert client.chat("hi", **fields, presence_penalty=1.0, tree_budget=16).json()["choices"] == plain


def test_after_a_thought():
    """The thought is free; the answer after it is not. The template opens the thought, so it is in the prompt."""
    with byte_server("right", template=THINKING_TEMPLATE) as client:
        schema = {"enum": ["yes", "no"]}
        # The wild law would think for long; a strong wish for the end tag's letters ends it soon.
        bias = {str(byte): 9 for byte in b"</think>"}
        fields = {"response_format": wanted(schema), "max_tokens": 200, "temperature": 0.7, "logit_bias": bias}
        for seed in range(2):
            plain = client.chat("hi", **fields, seed=seed, tree_budget=0).json()["choices"][0]
            tree = client.chat("hi", **fields, seed=seed, tree_budget=16).json()["choices"][0]
            assert plain == tree
            if plain["finish_reason"] == "length":
                assert plain["message"]["content"] == "" and plain["message"]["reasoning_content"]
            else:
                assert json.loads(plain["message"]["content"]) in ("yes", "no")


@pytest.fixture(scope="module")
def plain_client():
    with serving() as client:
        yield client


BAD_FORMATS = [
    {"type": "yaml"},
    {"type": "json_schema"},
    {"type": "json_object", "json_schema": {"name": "x", "schema": {}}},
    wanted({"type": "objet"}),
    wanted({"$ref": "#/nowhere"}),
    wanted({"$ref": "#"}),
    wanted({"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}}),
    wanted({"type": "string", "pattern": "("}),
    wanted({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    wanted({"type": "object", "properties": {"x": {"not": {}}}}),
    wanted(False),
    wanted(5),
    "json",
]


@pytest.mark.parametrize("response_format", BAD_FORMATS, ids=str)
def test_no_grammar_is_a_400(plain_client, response_format):
    client = plain_client
    for stream in (False, True):
        response = client.chat("hi", response_format=response_format, stream=stream)
        assert response.status_code == 400, response.text
        assert "response_format" in response.json()["error"]["message"] or response.json()["error"]["param"]
    assert client.chat("hi", max_tokens=2).status_code == 200


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 5}])
def test_what_would_go_on_after_the_json_is_refused(plain_client, fields):
    client = plain_client
    response = client.chat("hi", response_format={"type": "json_object"}, **fields)
    assert response.status_code == 400 and "response_format" in response.json()["error"]["message"]
    assert client.chat("hi", response_format={"type": "text"}, max_tokens=9, **fields).status_code == 200


def test_an_engine_that_ignores_the_grammar_is_not_believed():
    """A token that the grammar forbids can only be a fault; the request fails, and takes no other with it."""
    with serving(ScriptEngine("plain text")) as client:
        assert client.chat("hi").status_code == 200
        client.chat("hi", response_format={"type": "json_object"})
        grammar = client.engine.added[-1].grammar
        grammar.follow(list(b"plain"))
        assert grammar.error
        # From then on only an end is allowed.
        allowed = np.unpackbits(grammar.allowed_after(()), bitorder="little")
        assert np.flatnonzero(allowed).tolist() == [EOS]
