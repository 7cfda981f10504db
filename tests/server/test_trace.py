"""`ddtree_trace`: every round's tree in the stream, whose paths spell the answer; nothing of it where it is not asked for."""

import json

import pytest

from ddtree.engine import book
from tests.scripted import EOS
from tests.server.scripted import DRAFTERS, TEXTS, scripted_server
from tests.server.test_streams import CHAT, COMPLETIONS, HI, text_of

FIELDS = {"prompt": "hello", "seed": 3, "max_tokens": 60, "ignore_eos": True, "temperature": 0.8}


def traced(client, path=COMPLETIONS, **fields):
    chunks, done = client.stream(path, **fields, ddtree_trace=True)
    assert done
    return chunks, [chunk["ddtree_trace"] for chunk in chunks if "ddtree_trace" in chunk]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("budget", [0, 1, 16, 64])
def test_paths_and_bonus_tokens_spell_the_answer(drafter, budget):
    with scripted_server(drafter) as client:
        chunks, rounds = traced(client, tree_budget=budget, return_token_ids=True, **FIELDS)
        plain, _ = client.stream(COMPLETIONS, tree_budget=budget, return_token_ids=True, **FIELDS)
    token_ids = [t for chunk in chunks for c in chunk["choices"] for t in c["token_ids"]]
    assert token_ids == [t for chunk in plain for c in chunk["choices"] for t in c["token_ids"]]
    assert text_of(chunks) == text_of(plain)
    report = chunks[-1]["ddtree"]
    assert [each["round"] for each in rounds] == list(range(1, report["decode_rounds"] + 1))
    assert sum(len(each["tokens"]) - 1 for each in rounds) == report["nodes_verified"]
    # The first token is prefill's, the rest are the rounds'.
    assert [t for each in rounds for t in each["emitted"]] == token_ids[1:]
    context_length = len(FIELDS["prompt"])
    for each in rounds:
        check_round(each)
        assert each["context_length"] == context_length
        context_length += len(each["emitted"])


def check_round(each):
    size = len(each["token_ids"])
    assert all(len(each[name]) == size for name in ("tokens", "parents", "depths", "probabilities"))
    assert each["parents"][0] == -1 and each["depths"][0] == 0 and each["probabilities"][0] == 1
    for node in range(1, size):
        parent = each["parents"][node]
        assert 0 <= parent < node and each["depths"][node] == each["depths"][parent] + 1
        assert 0 <= each["probabilities"][node] <= 1
    path = each["path"]
    assert path[0] == 0 and [each["parents"][node] for node in path[1:]] == path[:-1]
    accepted = [each["token_ids"][node] for node in path[1:]]
    spelt = [*accepted, each["bonus_token"]["token_id"]]
    assert each["emitted"] == spelt[: len(each["emitted"])]
    assert set(each["stage_ms"]) == {"draft", "build", "verify", "accept", "commit"}
    assert 0 <= sum(each["stage_ms"].values()) <= each["round_ms"] + 0.01


def test_siblings_share_what_is_left_of_one():
    with scripted_server("some") as client:
        _, rounds = traced(client, tree_budget=64, **FIELDS)
    branching = 0
    for each in rounds:
        for parent in range(len(each["tokens"])):
            below = [p for p, q in zip(each["probabilities"], each["parents"], strict=True) if q == parent]
            branching += len(below) > 1
            assert sum(below) <= 1.001
    assert branching


def test_a_round_comes_before_its_text():
    with scripted_server("right") as client:
        chunks, _ = traced(client, tree_budget=16, **FIELDS)
    kinds = ["round" if "ddtree_trace" in chunk else "text" for chunk in chunks if chunk["choices"] == [] or text_of([chunk])]
    assert kinds[0] == "text" and kinds[1::2] == ["round"] * len(kinds[1::2]) and kinds[2::2] == ["text"] * len(kinds[2::2])


def test_pieces_of_characters_are_spelt_and_stops_cut_what_is_emitted():
    with scripted_server("right") as client:
        chunks, rounds = traced(client, tree_budget=64, **FIELDS | {"max_tokens": 13})
        tokens = {id: text for each in rounds for id, text in zip(each["token_ids"], each["tokens"], strict=True)}
    assert all(text == TEXTS[id].decode() for id, text in tokens.items() if id not in (EOS, 10, 11))
    assert all(tokens[id] == f"bytes:\\x{TEXTS[id][0]:02x}" for id in {10, 11} & tokens.keys())
    assert sum(len(each["emitted"]) for each in rounds) == 12
    assert sum(len(each["path"]) for each in rounds) - 12 == chunks[-1]["ddtree"]["trimmed_tokens"]


def test_chat_and_several_choices_and_usage_chunks():
    with scripted_server("some") as client:
        chunks, rounds = traced(
            client, CHAT, messages=HI, n=3, max_tokens=30, seed=1, tree_budget=16, stream_options={"include_usage": True}
        )
    assert {each["index"] for each in rounds} == {0, 1, 2}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert sum(len(each["tokens"]) - 1 for each in rounds) == chunks[-1]["ddtree"]["nodes_verified"]


def test_nothing_is_built_where_no_trace_is_wanted(monkeypatch):
    def build(*args):
        raise AssertionError("a trace was built")

    monkeypatch.setattr(book, "RoundTrace", build)
    with scripted_server("some") as client:
        chunks, done = client.stream(COMPLETIONS, tree_budget=16, **FIELDS)
        unwanted, _ = client.stream(COMPLETIONS, tree_budget=16, ddtree_trace=False, **FIELDS)
        broken = client.post(COMPLETIONS, FIELDS | {"stream": True, "ddtree_trace": True, "tree_budget": 16})
    assert done and text_of(chunks) == text_of(unwanted)
    assert not any("ddtree_trace" in chunk for chunk in [*chunks, *unwanted])
    assert "a trace was built" in broken.text  # so the two above would have shown it


@pytest.mark.parametrize(
    "path, fields, words",
    [
        (CHAT, {"messages": HI}, "stream: true"),
        (COMPLETIONS, {"prompt": "hi", "stream": False}, "stream: true"),
        (CHAT, {"messages": HI, "stream": True, "ddtree_trace": "yes"}, "ddtree_trace"),
        ("/v1/responses", {"input": "hi", "stream": True}, "/v1/chat/completions"),
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "stream": True}, "/v1/chat/completions"),
    ],
)
def test_where_it_cannot_be_served_it_is_refused(path, fields, words):
    with scripted_server("some") as client:
        answer = client.post(path, {"ddtree_trace": True} | fields)
        allowed = client.post(path, fields | {"ddtree_trace": False})
    message = json.dumps(answer.json()["error"])
    assert answer.status_code == 400 and "ddtree_trace" in message and words in message
    assert allowed.status_code == 200
