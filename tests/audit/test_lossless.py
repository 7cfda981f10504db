"""The audit's own parts: noise, near ties, transformers, prompts and their forms, the report, the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ddtree.audit.fidelity import acceptance_faults, by_depth, check_fidelity
from ddtree.audit.findings import Fault, Result, first_difference
from ddtree.audit.lossless import Audit
from ddtree.audit.noise import measure_noise, rescored
from ddtree.audit.plan import Plan
from ddtree.audit.prompts import BUILT_IN, Prompt, encode_all, prompt_fault, read_prompts
from ddtree.audit.reference import Reference
from ddtree.audit.render import render
from ddtree.audit.trace import trace_lines
from ddtree.engine.measure import start_auto
from ddtree.engine.request import Request
from ddtree.text import Tokenizer
from tests.audit.pairs import NumberTokenizer, audited, engine_of, random_prompts
from tests.text.conftest import CHATML, KINDS

PLAN = Plan(budgets=(0, 12), max_tokens=14)


@pytest.fixture
def chat_tokenizer() -> Tokenizer:
    pretrained = KINDS["split_digits"]()
    pretrained.chat_template = CHATML
    return Tokenizer(pretrained)


def test_sampled_output_is_identical_too(llama):
    result = audited(engine_of(llama), plan=Plan(budgets=(0, 12), max_tokens=14, temperatures=(0.8,), seed=3))
    assert result.passed and result.verdict == "identical", result.as_json()


def test_hybrid_is_identical(hybrid):
    result = audited(engine_of(hybrid), plan=PLAN)
    assert result.passed and result.verdict == "identical", result.as_json()


def test_auto_is_audited_beside_the_numbers(hybrid):
    engine = engine_of(hybrid)
    start_auto(engine, {"0": {"4": 2.0}}, limit_s=0.5)
    result = audited(engine, plan=Plan(budgets=(0, 12, "auto"), max_tokens=14))
    assert result.passed and result.verdict == "identical", result.as_json()
    assert set(result.acceptance_length) == {"12", "auto"} and result.budgets == [0, 12, "auto"]


def test_without_a_drafter_trees_come_from_the_scripted_ones(llama):
    engine = engine_of(llama)
    engine.drafter = None
    result = audited(engine, plan=PLAN)
    assert result.passed and result.rounds_inspected and not result.acceptance_length


def test_transformers_agrees_and_a_changed_layer_is_named(llama, llama_folder):
    reference = Reference.load(llama_folder, "cpu", torch.float32, ())
    engine = engine_of(llama)
    audit = Audit(engine, NumberTokenizer(), PLAN, reference)
    prompts = random_prompts(engine.vocab_size)
    assert audit.run(prompts).passed
    check_fidelity(audit, reference, None, prompts)
    assert [fault.where[:30] for fault in audit.result.faults] == ["drafter: acceptance length 1.0"]  # it is random
    llama.layers[1].mlp.down_proj.weight.mul_(-3.0)
    result = audited(engine, plan=PLAN, reference=reference)
    assert result.verdict == "mismatch"
    assert {each.where for each in result.divergences} and "layer 1 MLP differs from token 0 on" in result.divergences[0].where


@pytest.mark.parametrize(("exact", "verdict"), [(False, "near_tie"), (True, "mismatch")])
def test_no_near_tie_excuses_a_batch_invariant_engine(llama, exact, verdict, monkeypatch):
    """Drafted answers differ in a token that the target, by the noise told here, hardly prefers."""
    engine = engine_of(llama)
    engine.config = replace(engine.config, batch_invariant=exact)
    generate, noise = Audit.generate, measure_noise(llama, list(range(40)))

    def other(self, request, *args):
        tokens = generate(self, request, *args)
        return [*tokens[:-1], (tokens[-1] + 1) % engine.vocab_size] if request.tree_budget else tokens

    monkeypatch.setattr(Audit, "generate", other)
    monkeypatch.setattr(type(noise), "limit", property(lambda self: 1e9))
    result = audited(engine, plan=PLAN)
    assert {each.verdict for each in result.divergences} == {verdict} and result.verdict == verdict


def test_noise_is_measured_and_bounded(llama):
    tokens = list(range(40))
    noise = measure_noise(llama, tokens)
    assert 0 < noise.measured < 1e-4 and noise.limit <= 1e-4 and not noise.excessive
    token, margin = rescored(llama, Request(tuple(tokens), 1), tokens)
    assert 0 <= token < 97 and margin > 0


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_prompt_files(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 7, "turns": ["hello", "more"]}\n\n')
    assert read_prompts(file) == [("7", "hello")]
    assert len(read_prompts(None)) == len(BUILT_IN) == 12
    file.write_text('{"id": "a"}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_prompts(file)


def test_both_forms_are_sound(chat_tokenizer):
    prompts = encode_all(chat_tokenizer, [("a", "hello world"), ("b", "bye")])
    assert [(each.id, each.form) for each in prompts] == [("a", "chat"), ("a", "raw"), ("b", "chat"), ("b", "raw")]
    assert [prompt_fault(chat_tokenizer, each) for each in prompts] == [None] * 4


def test_a_template_applied_to_a_raw_completion_is_named(chat_tokenizer):
    chat = encode_all(chat_tokenizer, [("a", "hello world")])[0]
    found = prompt_fault(chat_tokenizer, Prompt("a", "raw", "hello world", chat.token_ids))
    assert "a chat template was applied to a raw completion" in found and "<|im_start|>" in found


def test_a_double_bos_and_a_changed_text_are_named(chat_tokenizer):
    chat, raw = encode_all(chat_tokenizer, [("a", "hello world")])
    bos = chat_tokenizer.pretrained.bos_token_id
    assert "two BOS tokens" in prompt_fault(chat_tokenizer, Prompt("a", "chat", chat.text, (bos, *chat.token_ids)))
    assert "special tokens" in prompt_fault(chat_tokenizer, Prompt("a", "chat", chat.text, chat.token_ids[1:]))
    assert "its ids read" in prompt_fault(chat_tokenizer, Prompt("a", "raw", "other words", raw.token_ids))


def test_the_alarm_at_acceptance_one():
    result = Result()
    acceptance_faults({16: {1: 30}, 8: {1: 3}, 64: {3: 30}}, {"16": 3.1, "64": 8.0}, result)
    assert [fault.budget for fault in result.faults] == [16] and "acceptance length 1.00" in result.faults[0].where
    assert any("too few" in note for note in result.notes) and any("card says 8.00" in note for note in result.notes)
    assert by_depth({1: 2, 3: 2}) == [0.5, 0.5]


def test_report_and_trace(llama):
    engine = engine_of(llama)
    audit = Audit(engine, NumberTokenizer(), PLAN)
    result = audit.run(random_prompts(engine.vocab_size))
    page = render(result, audit.inside.inspections, lambda token_id: f"<{token_id}>", "audit of tiny")
    assert "<svg" in page and "#1b7f4b" in page and "&lt;" in page and "identical" in page
    assert 'stroke="#b3261e"' not in page
    wrong = audit.inside.inspections[0][1]
    wrong.faults.append(Fault("target", "layer 0 attention: sibling 1 leaks into node 2"))
    page = render(result, audit.inside.inspections, lambda token_id: f"<{token_id}>", "audit of tiny")
    assert page.count('stroke="#b3261e"') == 2 and page.index("sibling 1 leaks") < page.index('stroke="#b3261e"')
    wrong.faults.clear()
    lines = [json.loads(line) for line in trace_lines(audit.inside.inspections, str)]
    assert len(lines) == result.rounds_inspected and lines[0]["path"][0] == 0
    json.dumps(result.as_json(), allow_nan=False)
