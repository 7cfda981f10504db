"""Token masks by a node's own path: with Qwen3's own tokenizer, a padded vocabulary, and random trees."""

import json

import numpy as np
import pytest

from ddtree.text.grammar import GrammarCompiler, schema_lark, whole_lark
from ddtree.text.parse import Thought
from ddtree.text.tools import Tool, ToolFormat, calls_lark

PADDED = 151936  # as Qwen3's models have it, 267 more than the tokenizer's tokens
TOOL = Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
CALLS = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 東京"}}\n</tool_call>',
    ToolFormat.XML: (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n東京\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
}
THOUGHTS = {None: "", Thought.OPEN: "hm, <b>?</b>\n</think>\n\n", Thought.UNDECIDED: "<think>\nhm\n</think>\n\n"}


@pytest.fixture(scope="module")
def compiler(qwen3):
    tags = qwen3.thought_tag_ids | qwen3.call_tag_ids
    return GrammarCompiler(qwen3, PADDED, qwen3.eos_token_ids, tags)


def bits(mask):
    return np.unpackbits(mask, bitorder="little")[:PADDED].astype(bool)


@pytest.mark.parametrize("thought", THOUGHTS, ids=str)
@pytest.mark.parametrize("format", CALLS)
def test_what_a_model_writes_is_allowed_token_by_token(qwen3, compiler, format, thought):
    grammar = compiler.compile(whole_lark(calls_lark(format, [TOOL], several=True), thought))
    emitted, end = [], min(qwen3.eos_token_ids)
    for token_id in qwen3.encode(THOUGHTS[thought] + CALLS[format], add_special_tokens=False):
        allowed = bits(grammar.allowed_after(()))
        assert allowed[token_id], (qwen3.decode(emitted), qwen3.token_text(token_id))
        assert not allowed[end] and not allowed[qwen3.vocab_size :].any()
        emitted.append(token_id)
        grammar.follow(emitted)
    assert bits(grammar.allowed_after(()))[end] and grammar.error is None


def test_every_node_is_judged_by_its_own_path(qwen3, compiler):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 12, "x"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    compiled = compiler.compile(whole_lark(schema_lark(schema), None))
    texts = ['{"a": 1, "b": true}', '{"a": 12, "b": false}', '{"a":"x","b":true}', '{"b": 1}', "plain"]
    token_ids, parents = [0], [-1]
    for text in texts:
        node = 0
        for token_id in [*qwen3.encode(text, add_special_tokens=False), min(qwen3.eos_token_ids), 5]:
            known = [i for i, parent in enumerate(parents) if parent == node and token_ids[i] == token_id]
            if not known:
                token_ids.append(token_id)
                parents.append(node)
            node = known[0] if known else len(parents) - 1
    # Parents precede children; nothing else is said about the order.
    token_ids, parents = np.array(token_ids), np.array(parents)
    grammar = compiled.copy()
    fits = grammar.fits(token_ids, parents)
    for node in range(len(parents)):
        path = [int(token_ids[node])] if node else []
        above = int(parents[node])
        while above > 0:
            path.insert(0, int(token_ids[above]))
            above = int(parents[above])
        alone, good = compiled.copy(), True
        for step, token_id in enumerate(path):
            allowed = bits(alone.allowed_after(()))
            ended = step > 0 and path[step - 1] in qwen3.eos_token_ids
            good = good and not ended and bool(allowed[token_id])
            if good:
                alone.follow(path[: step + 1])
        assert fits[node] == good, path
        mask = grammar.allowed_after(path)
        if good and not (path and path[-1] in qwen3.eos_token_ids):
            assert np.array_equal(mask, alone.allowed_after(()))
        else:
            assert mask is None
    complete = [text for text in texts[:3] if json.loads(text)]
    assert fits.sum() > len(complete) and not fits.all()
    assert np.array_equal(grammar.allowed_after(()), compiled.copy().allowed_after(())), "the walk must leave no trace"
