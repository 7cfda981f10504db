"""A server audited from outside: the real app over a scripted engine, and canned servers of other makes."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from ddtree.audit.plan import Plan
from ddtree.audit.served import ServedAudit
from ddtree.client import HttpNoise, ServerClient
from ddtree.engine.request import Emission
from tests.server.fakes import FACTS, ScriptEngine, serving

PLAN = Plan(budgets=(0, 8, 16), max_tokens=40)
TEXTS = [("fox", "Tell me of the fox."), ("dog", "And of the dog?")]
LONG = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."


class Http:
    """The fakes' client with httpx's names."""

    def __init__(self, client):
        self.client = client

    def get(self, path):
        return self.client.get(path)

    def post(self, path, json):
        return self.client.post(path, json)


def audit_of(client, plan=PLAN, **options):
    return ServedAudit(ServerClient("http://test/v1", http=client), plan, **options)


def served(engine=None, plan=PLAN, facts=FACTS, **options):
    with serving(engine or ScriptEngine(LONG), facts=facts) as running:
        return audit_of(Http(running), plan, **options).run(TEXTS)


def test_a_sound_server_is_identical_and_what_was_not_seen_is_said():
    result = served()
    assert result.verdict == "identical" and result.exit_status == 0, result.as_json()
    assert result.prompts == 4 and result.packed == 1 and result.drafter == "not_inspected"
    assert result.acceptance_length == {"8": 3.0, "16": 3.0}
    assert any("in the process" in what for what in result.unchecked)
    json.dumps(result.as_json(), allow_nan=False)


class Lossy(ScriptEngine):
    """Writes another token at place 10 where the budget is 16."""

    def _advance(self, request_id):
        request, before = self.live[request_id]
        emission = super()._advance(request_id)
        if request.tree_budget == 16 and before == 10:
            return Emission(request_id, (ord("#"), *emission.token_ids[1:]), emission.finish_reason, stats=emission.stats)
        return emission


def test_tokens_that_change_with_the_budget_are_a_mismatch():
    result = served(Lossy(LONG))
    assert result.verdict == "mismatch" and result.exit_status == 1
    first = result.divergences[0]
    assert (first.budget, first.position, first.other_token) == (16, 10, "'#'") and "in the process" in first.where


@pytest.mark.parametrize(("exact", "verdict"), [(False, "near_tie"), (True, "mismatch")])
def test_no_near_tie_excuses_a_batch_invariant_server(exact, verdict, monkeypatch):
    monkeypatch.setattr(HttpNoise, "measure", lambda client, model, dtype: HttpNoise(client, model, 0.25, 0.5))
    monkeypatch.setattr(HttpNoise, "margin", lambda self, token_ids: 0.125)
    result = served(Lossy(LONG), facts=replace(FACTS, batch_invariant=exact))
    assert {each.verdict for each in result.divergences} == {verdict} and result.verdict == verdict
    assert result.divergences[0].margin == 0.125 and result.near_tie_limit == (None if exact else 0.5)
    assert any("batch-invariant" in note for note in result.notes) is exact


def test_a_stop_that_is_read_too_late_and_a_wrong_count():
    class Late(ScriptEngine):
        def _advance(self, request_id):
            request, before = self.live[request_id]
            if request.stop_token_ids:
                object.__setattr__(request, "stop_token_ids", frozenset())
            return super()._advance(request_id)

    result = served(Late(LONG))
    assert result.verdict == "mismatch" and any("stop at token" in each.against for each in result.divergences)

    class Miscounting(ScriptEngine):
        def _stats(self, request, *args):
            stats = super()._stats(request, *args)
            stats.trimmed_tokens += 1
            return stats

    result = served(Miscounting(LONG))
    assert result.faults[0].kind == "counts" and "trimmed" in result.faults[0].where


def test_a_template_in_raw_completions_is_named(monkeypatch):
    from ddtree.server.text import Text

    sound = Text.encode

    def rendering(self, text, param, *rest, **options):
        return sound(self, f"user: {text}\nassistant: " if param == "prompt" else text, param, *rest, **options)

    monkeypatch.setattr(Text, "encode", rendering)
    result = served()
    assert result.verdict == "mismatch" and "a chat template was applied to a raw completion" in result.faults[0].where


def test_a_stream_that_loses_a_piece_is_found():
    class Losing(Http):
        def post(self, path, json):
            answer = super().post(path, json)
            if not json.get("stream"):
                return answer
            events = answer.text.split("\n\n")
            return httpx.Response(200, text="\n\n".join(events[:2] + events[3:]))

    with serving(ScriptEngine(LONG)) as running:
        result = audit_of(Losing(running)).run(TEXTS)
    assert result.verdict == "mismatch" and any("streamed, its text is" in fault.where for fault in result.faults)


class Foreign:
    """A server of another make: no ids, no budgets, no /tokenize; strict about unknown fields."""

    def __init__(self, text=LONG, heeds_stops=True, renders_raw=False):
        self.text, self.heeds_stops, self.renders_raw = text, heeds_stops, renders_raw

    def client(self):
        return httpx.Client(base_url="http://test", transport=httpx.MockTransport(self.answer))

    def answer(self, request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "other"}]})
        if not request.url.path.endswith("completions"):
            return httpx.Response(404, json={})
        body = json.loads(request.content)
        if "tree_budget" in body:
            return httpx.Response(422, json={"error": "extra fields not permitted"})
        words = self.text.split(" ")[: body["max_tokens"]]
        text, finish = " ".join(words), "length" if len(words) < len(self.text.split(" ")) else "stop"
        for stop in body.get("stop") or () if self.heeds_stops else ():
            if stop in text:
                text, finish = text[: text.index(stop)], "stop"
        chat = "messages" in body
        usage = {"prompt_tokens": 9 if chat or self.renders_raw else 5, "completion_tokens": len(words)}
        if body.get("stream"):
            deltas = [{"delta": {"content": text}} if chat else {"text": text}, {"delta": {}, "finish_reason": finish}]
            events = "".join(f"data: {json.dumps({'choices': [each]})}\n\n" for each in deltas)
            return httpx.Response(200, text=events + f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n")
        choice = {"message": {"content": text}} if chat else {"text": text}
        return httpx.Response(200, json={"choices": [choice | {"finish_reason": finish}], "usage": usage})


def test_another_server_is_audited_by_its_text():
    result = audit_of(Foreign().client()).run(TEXTS)
    assert result.verdict == "identical" and result.drafter == "none", result.as_json()
    assert any("tree_budget" in what for what in result.unchecked) and any("thinking" in what for what in result.unchecked)
    result = audit_of(Foreign(heeds_stops=False).client()).run(TEXTS)
    assert result.verdict == "mismatch" and "stop string" in result.divergences[0].against
    result = audit_of(Foreign(renders_raw=True).client()).run(TEXTS)
    assert result.verdict == "mismatch" and "a chat template was applied to a raw completion" in result.faults[0].where


def test_another_server_against_a_model_of_ones_own():
    def local(case):
        yield "the local model", LONG.replace("lazy", "late"), lambda position: (0.7, "mismatch")

    result = audit_of(Foreign().client(), local=local).run(TEXTS)
    first = result.divergences[0]
    assert result.verdict == "mismatch" and first.against == "the local model" and first.position == LONG.index("zy dog")
    assert "the server's plain answer" in first.where


def test_nobody_there_and_no_server_of_the_kind():
    def silent(request):
        raise httpx.ConnectError("refused")

    with pytest.raises(ValueError, match="is it running"):
        audit_of(httpx.Client(base_url="http://test", transport=httpx.MockTransport(silent)))
    empty = httpx.Client(base_url="http://test", transport=httpx.MockTransport(lambda request: httpx.Response(404)))
    with pytest.raises(ValueError, match="OpenAI-compatible"):
        audit_of(empty)


def test_margins_over_http_and_their_noise():
    def answer(request):
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1, 2, 3]})
        count = body["max_tokens"]
        shift = 0.0 if count > 1 else 3e-5
        top = [{"a": -0.5 + shift, "b": -0.50002}] * count
        return httpx.Response(200, json={"choices": [{"text": "x" * count, "token_ids": [7] * count, "logprobs": {"top_logprobs": top}}]})

    client = ServerClient("http://test", http=httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer)))
    noise = HttpNoise.measure(client, "m", "float32")
    assert noise.measured == pytest.approx(3e-5) and noise.limit == pytest.approx(6e-5)
    assert noise.margin([1, 2]) == pytest.approx(5e-5) and noise.margin([1, 2]) <= noise.limit
