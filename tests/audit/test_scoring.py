"""Trees that are not ranked by what their candidates are worth: the output is right, and the audit says which node is not."""

from __future__ import annotations

import pytest
import torch

from ddtree.audit.plan import Plan
from ddtree.engine import decode_round
from ddtree.engine.drafter import Drafter
from ddtree.engine.scoring import PathScorer
from ddtree.models.adapter import SUMMARIES, Adapter, AdapterConfig
from ddtree.models.conditioning import Conditioning
from ddtree.models.registry import load_target
from ddtree.tree.build import Candidates, build_ddtree
from tests.audit.pairs import audited, engine_of
from tests.models.qwens import drafter_for, engine_around

PLAN = Plan(budgets=(0, 12), max_tokens=9)


def conditioned(llama, summary: str = "none", dtype: torch.dtype = torch.float32, size: float = 0.3):
    """A pair whose trees a random adapter ranks."""
    torch.manual_seed(5)
    drafter = drafter_for(llama.config)
    for parameter in drafter.parameters():  # the frequencies stay what they are
        parameter.data = parameter.data.to(dtype)
    adapter = Adapter(AdapterConfig(drafter.config.hidden_size, drafter.config.block_size, 16, 8, summary))
    for parameter in adapter.requires_grad_(False).parameters():
        parameter.normal_(0.0, size)
    adapter.to(dtype)
    return engine_around(llama, Drafter(drafter, llama, Conditioning(adapter, llama, tables=False)))


def where(engine) -> str:
    result = audited(engine, plan=PLAN)
    assert result.verdict == "identical" and result.drafter == "faulty" and result.exit_status == 3
    return " | ".join(fault.where for fault in result.faults)


@pytest.mark.parametrize("summary", SUMMARIES)
def test_a_sound_adapter_is_sound(llama, summary):
    result = audited(conditioned(llama, summary), plan=PLAN)
    assert result.passed and result.drafter == "sound", result.as_json()


def test_in_bf16_an_adapter_is_sound_and_half_a_nat_amiss_is_found(llama_folder, monkeypatch):
    llama = load_target(llama_folder, "cpu", torch.bfloat16)
    result = audited(conditioned(llama, "grandparent", torch.bfloat16, 0.1), plan=PLAN)
    assert result.exit_status == 0 and result.drafter == "sound", result.as_json()
    sound = PathScorer.children

    def raised(self, depth, ranks, parents):
        scores = sound(self, depth, ranks, parents)
        scores[:, 0] += 0.5  # of the drafter's best candidate alone
        return scores

    monkeypatch.setattr(PathScorer, "children", raised)
    result = audited(conditioned(llama, "grandparent", torch.bfloat16, 0.1), plan=PLAN)
    assert result.drafter == "faulty" and "depth 1, below node 0" in result.faults[0].where and "by the adapter it is" in result.faults[0].where


def test_scores_below_another_parent(llama, monkeypatch):
    sound = PathScorer.children

    def turned(self, depth, ranks, parents):
        return sound(self, depth, (ranks + 1) % len(self.own[0]) if depth > 1 else ranks, parents)

    monkeypatch.setattr(PathScorer, "children", turned)
    found = where(conditioned(llama))
    assert "draft tree: node " in found and "depth 2" in found and "by the adapter it is" in found


def test_an_adapter_that_reads_the_slot_before(llama, monkeypatch):
    sound = Adapter.places
    monkeypatch.setattr(Adapter, "places", lambda self, slots, roots: sound(self, slots.roll(1, dims=1), roots))
    found = where(conditioned(llama))
    assert "draft tree: node " in found and "depth 1, below node 0" in found and "by the adapter it is" in found


def test_corrections_without_the_drafters_own_weight(llama, monkeypatch):
    def lighter(out, matches, log_probs):
        return torch.cat([matches, out[..., -1:]], dim=-1)

    monkeypatch.setattr(Adapter, "corrections", staticmethod(lighter))
    assert "by the adapter it is" in where(conditioned(llama))


def test_a_sibling_that_the_builder_leaves_out(llama, monkeypatch):
    def thinned(root_token, candidates, budget):
        kept = [place for place in range(candidates.token_ids.shape[1]) if place != 1]
        return build_ddtree(root_token, Candidates(candidates.token_ids[:, kept], candidates.log_probs[:, kept]), budget)

    monkeypatch.setattr(decode_round, "build_ddtree", thinned)
    assert "is left out: it is not the best-first tree" in where(engine_of(llama))


@pytest.mark.parametrize("kept", [0, 6])
def test_a_builder_that_spends_less_than_its_budget(llama, monkeypatch, kept):
    monkeypatch.setattr(decode_round, "build_ddtree", lambda root_token, candidates, budget: build_ddtree(root_token, candidates, min(kept, budget)))
    assert f"the tree has {kept} of 12 nodes, and is left out" in where(engine_of(llama))


def test_scores_that_forget_their_parents(llama, monkeypatch):
    def flat(root_token, candidates, budget):
        tree = build_ddtree(root_token, candidates, budget)
        tree.scores[1:] -= tree.scores[tree.parents[1:]]
        return tree

    monkeypatch.setattr(decode_round, "build_ddtree", flat)
    assert "by its depth's candidates it is" in where(engine_of(llama))
