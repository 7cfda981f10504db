"""JSON by schema from the embedded pair: always parses and fits, the same at every budget, drafts accepted."""

import json

import pytest

from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from ddtree.text.grammar import GrammarCompiler, schema_lark, whole_lark

pytestmark = pytest.mark.real

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["Tier", "Pflanze", "größer", "日本", "other"]},
        "size": {
            "type": "object",
            "properties": {"height_m": {"type": "number", "minimum": 0, "maximum": 9999}, "unit": {"const": "m²"}},
            "required": ["height_m", "unit"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "known": {"type": ["boolean", "null"]},
    },
    "required": ["name", "kind", "size", "tags", "known"],
    "additionalProperties": False,
}
THINGS = (
    "an oak", "a cat", "the Eiffel Tower", "a bicycle", "the river Nile", "a violin", "a lighthouse", "an apple",
    "a whale", "the Moon", "a castle", "a tulip", "a robot", "a bridge", "a mountain", "a sparrow", "a train",
    "a desert", "a clock", "a ship", "a rose", "a wolf", "a lamp", "a book", "a drum", "a kite", "a fox", "a stone",
    "a cloud", "a pear", "a tent", "a mill", "a harp", "a goat", "a barn", "a coin", "a door", "a fern", "a glove",
    "a hat", "an igloo", "a jar", "a knot", "a leaf", "a mask", "a nest", "an owl", "a plum", "a quilt", "a raft",
)  # fmt: skip


def check(value):
    assert list(value) == ["name", "kind", "size", "tags", "known"] and len(value["name"]) <= 24
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"] and value["known"] in (True, False, None)
    assert value["size"]["unit"] == "m²" and 0 <= value["size"]["height_m"] <= 9999
    assert 1 <= len(value["tags"]) <= 3 and all(len(tag) <= 12 for tag in value["tags"])


@pytest.fixture(scope="module")
def grammar(pair):
    compiler = GrammarCompiler(pair.tokenizer, pair.engine.vocab_size, pair.tokenizer.eos_token_ids)
    return compiler.compile(whole_lark(schema_lark(SCHEMA), None))


def answer(pair, grammar, thing, budget):
    prompt = pair.chat_ids(f"Describe {thing} as JSON with name, kind, size, tags and known. No other text.")
    eos = frozenset(pair.tokenizer.eos_token_ids)
    return pair.engine.generate(Request(prompt, 400, tree_budget=budget, eos_token_ids=eos, grammar=grammar.copy()))


def compare(pair, grammar, things, budgets):
    """The mean acceptance length over all rounds with a tree."""
    rounds = emitted = 0
    for thing in things:
        plain = answer(pair, grammar, thing, 0)
        assert plain.finish_reason == "stop", thing
        check(json.loads(pair.tokenizer.decode(list(plain.token_ids))))
        for budget in budgets:
            tree = answer(pair, grammar, thing, budget)
            assert tree.token_ids == plain.token_ids, (thing, budget)
            assert tree.stats.mode == "ddtree"
            rounds += tree.stats.decode_rounds
            emitted += sum(length * count for length, count in tree.stats.acceptance_histogram.items())
    return emitted / rounds


@pytest.mark.long
def test_schema_with_a_tree_equals_plain(pair, grammar):
    assert compare(pair, grammar, THINGS[1:2], [16]) > 1.2


def test_penalties_and_logprobs_beside_a_schema(pair, grammar):
    """The same tokens; log-probabilities to the last digits that rows computed together keep of those computed alone."""
    prompt = pair.chat_ids("Describe a cat as JSON with name, kind, size, tags and known. No other text.")
    sampling = SamplingParams(frequency_penalty=0.6)
    plain, tree = (
        pair.engine.generate(Request(prompt, 24, sampling, tree_budget=budget, grammar=grammar.copy(), num_logprobs=2))
        for budget in (0, 16)
    )
    assert plain.token_ids == tree.token_ids and tree.stats.decode_rounds < plain.stats.decode_rounds
    for one, other in zip(plain.logprobs, tree.logprobs, strict=True):
        assert one.token_id == other.token_id and abs(one.logprob - other.logprob) < 1e-4
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_fifty_prompts(pair, grammar):
    assert compare(pair, grammar, THINGS, [16, 64]) > 1.2
