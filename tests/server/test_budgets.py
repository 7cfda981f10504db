"""Over HTTP, whole and streamed: every answer is the same at every budget, whatever the drafter does."""

import threading

import pytest

from tests.scripted import EOS
from tests.server.scripted import BUDGETS, DRAFTERS, TEXTS, scripted_server

REQUESTS = {
    "plain": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 5},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "logprobs": 0},
    "bias": {"logit_bias": {"0": -100, "6": 2.5}, "seed": 1, "temperature": 1},
    "stop strings": {"stop": ["hfg", "a ", "ee"]},
    "min_tokens": {"min_tokens": 9, "stop": ["e", "i"], "stop_token_ids": [2]},
    "choices": {"n": 3, "temperature": 1.0, "seed": 8},
    "prompts": {"prompt": [[0], [1, 2, 3], [12]], "n": 2, "temperature": 0.5, "seed": 2},
    "ignore_eos": {"ignore_eos": True},
}


@pytest.fixture(scope="module", params=DRAFTERS)
def client(request):
    with scripted_server(request.param) as client:
        client.drafter = request.param
        yield client


def answer(client, budget, **fields):
    body = {"prompt": "hello", "max_tokens": 16, "temperature": 0, "return_token_ids": True} | fields
    return client.post("/v1/completions", body | {"tree_budget": budget}).raise_for_status().json()


def reading(choices):
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs")
    return [{name: choice[name] for name in names} for choice in choices]


def streamed(client, budget, **fields):
    """The choices of a stream, put together as a client does."""
    body = {"prompt": "hello", "max_tokens": 16, "temperature": 0, "return_token_ids": True} | fields
    options = {"tree_budget": budget, "stream_options": {"include_usage": True}}
    chunks, done = client.stream("/v1/completions", **body, **options)
    assert done
    choices = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            start = {"index": part["index"], "text": "", "token_ids": [], "logprobs": None}
            choice = choices.setdefault(part["index"], start)
            choice["text"] += part["text"]
            choice["token_ids"] += part["token_ids"]
            choice |= {name: part.get(name) for name in ("finish_reason", "stop_reason")}
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)], chunks[-1]["usage"]


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
def test_same_at_every_budget_whole_and_streamed(client, fields):
    plain = answer(client, 0, **fields)
    for budget in BUDGETS[: -1 if client.drafter != "right" else None]:
        whole = answer(client, budget, **fields)
        assert reading(whole["choices"]) == reading(plain["choices"]), budget
        assert whole["usage"] == plain["usage"]
        assert whole["usage"]["completion_tokens"] == sum(len(each["token_ids"]) for each in whole["choices"])
        assert whole["ddtree"]["mode"] == ("ddtree" if budget else "target_only")
        choices, usage = streamed(client, budget, **fields)
        assert reading(choices) == reading(plain["choices"]), budget
        assert usage == plain["usage"]


def test_logprobs_of_completions_are_parallel_and_place_the_text(client):
    choice = answer(client, 16, logprobs=2, stop_token_ids=[3])["choices"][0]
    found = choice["logprobs"]
    assert len({len(values) for values in found.values()}) == 1 and len(found["tokens"]) == len(choice["token_ids"])
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert logprob <= 0 and top[token] == logprob and 2 <= len(top) <= 3
    shown = [TEXTS[token_id] for token_id in choice["token_ids"]]
    for token, raw in zip(found["tokens"], shown, strict=True):
        assert token == (raw.decode() if raw not in (b"\xc3", b"\xa9") else f"bytes:\\x{raw[0]:02x}")
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0
    place = next(i for i, raw in enumerate(shown) if raw == b"fg") if b"fg" in shown else None
    if place is not None:
        assert choice["text"][found["text_offset"][place] :].startswith("fg")


@pytest.mark.parametrize("budget", BUDGETS[:-1])
def test_logprobs_of_chat(client, budget):
    fields = {"temperature": 0, "max_tokens": 12, "tree_budget": budget, "logprobs": True, "top_logprobs": 4}
    body = client.chat("hi", **fields).raise_for_status().json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    for token in content:
        tops = [each["logprob"] for each in token["top_logprobs"]]
        # Greedy: the chosen token is the most probable one.
        assert len(tops) == 4 and tops == sorted(tops, reverse=True) and token["logprob"] == tops[0]
        assert bytes(token["bytes"]) in TEXTS
    chunks, _ = client.stream("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **fields)
    parts = [part["logprobs"] for chunk in chunks for part in chunk["choices"] if part["logprobs"]]
    assert [token for part in parts for token in part["content"]] == content


def test_logprobs_off_unless_asked(client):
    fields = {"max_tokens": 2, "ignore_eos": True}
    assert client.chat("hi", **fields).json()["choices"][0]["logprobs"] is None
    only = client.chat("hi", **fields, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in only] == [[], []]
    assert client.chat("hi", top_logprobs=3).status_code == 400


@pytest.mark.parametrize("budget", BUDGETS[:-1])
def test_forged_stops_and_caps(client, budget):
    full = answer(client, 0, ignore_eos=True, max_tokens=12)["choices"][0]["token_ids"]
    for k, token_id in enumerate(full):
        fields = {"ignore_eos": True, "tree_budget": budget}
        choices, _ = streamed(client, budget, stop_token_ids=[token_id], ignore_eos=True, max_tokens=12)
        assert choices[0]["token_ids"] == full[: full.index(token_id) + 1]
        assert (choices[0]["finish_reason"], choices[0]["stop_reason"]) == ("stop", token_id)
        capped = answer(client, budget, max_tokens=k + 1, **fields)["choices"][0]
        assert (capped["token_ids"], capped["finish_reason"]) == (full[: k + 1], "length")


def test_banned_tokens_never_come_and_wanted_ones_do(client):
    banned = {str(token_id): -100 for token_id in (0, 1, 2, EOS)}
    choice = answer(client, 16, logit_bias=banned, max_tokens=40)["choices"][0]
    assert not {0, 1, 2, EOS} & set(choice["token_ids"]) and len(choice["token_ids"]) == 40
    assert set(answer(client, 16, logit_bias={"8": 100}, max_tokens=9)["choices"][0]["token_ids"]) == {8}


def test_eight_clients_at_once_each_get_what_they_get_alone(client):
    bodies = [
        {
            "prompt": [[i], [i, 3]],
            "temperature": 0.3 * (i % 3),
            "seed": i,
            "tree_budget": BUDGETS[i % 4],
            "max_tokens": 9 + i,
        }
        | ([{}, {"stop": "e"}, {"presence_penalty": 1.0}, {"logprobs": 1}][i % 4])
        for i in range(8)
    ]
    alone = [answer(client, body["tree_budget"], **body) for body in bodies]
    found = [None] * len(bodies)

    def ask(place):
        found[place] = answer(client, bodies[place]["tree_budget"], **bodies[place])

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for single, beside in zip(alone, found, strict=True):
        assert reading(single["choices"]) == reading(beside["choices"]) and single["usage"] == beside["usage"]


def test_a_seed_repeats_and_its_absence_varies(client):
    sampled = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    first = answer(client, 16, **sampled)
    again = answer(client, 1, **sampled, seed=first["ddtree"]["seed"])
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert len({tuple(answer(client, 16, **sampled)["choices"][0]["token_ids"]) for _ in range(3)}) > 1


def test_a_stop_before_the_cap_wins_and_one_behind_it_does_not(client):
    full = answer(client, 0, ignore_eos=True, max_tokens=12)["choices"][0]["token_ids"]
    place = next(i for i in range(3, 12) if full[i] not in full[:i])
    for budget in (1, 16, 64):
        fields = {"ignore_eos": True, "stop_token_ids": [full[place]]}
        ends = {cap: answer(client, budget, max_tokens=cap, **fields)["choices"][0] for cap in (place, place + 1, 12)}
        assert [ends[cap]["finish_reason"] for cap in ends] == ["length", "stop", "stop"]
        assert [ends[cap]["stop_reason"] for cap in ends] == [None, full[place], full[place]]
        assert ends[12]["token_ids"] == full[: place + 1]
