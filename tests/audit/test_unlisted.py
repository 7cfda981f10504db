"""Faults that nobody listed: what the audit says must still point at the part."""

from __future__ import annotations

import pytest
import torch

from ddtree.audit.plan import Plan
from ddtree.caches import recurrent
from ddtree.engine import decode_round
from ddtree.engine.drafter import Drafter
from ddtree.engine.target import Target
from ddtree.models import block_attention, layers
from ddtree.models.adapter import Adapter, AdapterConfig
from ddtree.models.conditioning import Conditioning
from ddtree.models.dflash import DFlash
from ddtree.models.layers import MLP
from tests.audit.pairs import audited, engine_of
from tests.models.qwens import drafter_for, engine_around

GREEDY = Plan(budgets=(0, 12), max_tokens=14)
SAMPLED = Plan(budgets=(0, 12), max_tokens=14, temperatures=(0.8,))


def wheres(engine, plan=GREEDY) -> str:
    result = audited(engine, plan=plan)
    assert not result.passed
    return " | ".join(fault.where for fault in result.faults)


def test_noise_by_row_instead_of_depth(llama, monkeypatch):
    def by_row(self, sequence, tree, logits, position):
        from ddtree.sampling.choose import choose

        noise = sequence.noise(position, len(logits)) if sequence.noise else None
        return choose(logits, sequence.request.sampling, noise).numpy()

    monkeypatch.setattr(Target, "_choose", by_row)
    assert "its logits choose token" in wheres(engine_of(llama), SAMPLED)


def test_candidates_of_the_slot_before(llama, monkeypatch):
    sound = DFlash.forward

    def shifted(self, block, caches):
        return sound(self, block, caches).roll(1, dims=1)

    monkeypatch.setattr(DFlash, "forward", shifted)
    assert "drafter block: its final hidden states" in wheres(engine_of(llama))


def test_rankings_of_other_depths(llama, monkeypatch):
    sound = Drafter._candidates

    def turned(self, sequence, states, logits, depth):
        return sound(self, sequence, states, logits.roll(1, 0), depth)

    monkeypatch.setattr(Drafter, "_candidates", turned)
    assert "drafter candidates: depth 1 does not rank by slot 1's logits; they are slot" in wheres(engine_of(llama))


def test_drafter_block_attends_causally(llama, monkeypatch):
    mask = block_attention.CachedBlockAttention._mask
    monkeypatch.undo()
    monkeypatch.setattr(block_attention.CachedBlockAttention, "_mask", lambda self, n, c, w, d: mask(self, n, True, w, d))
    assert "drafter layer 0 attention: slot" in wheres(engine_of(llama))


def test_context_absorbed_one_position_late(llama, monkeypatch):
    sound = DFlash.project_context
    monkeypatch.setattr(DFlash, "project_context", lambda self, features, at: sound(self, features, at + 1))
    assert "drafter layer 0 RoPE" in wheres(engine_of(llama))


def test_tree_rows_miss_the_last_committed_token(llama, monkeypatch):
    sound = layers.tree_attention

    def forgetful(query, keys, values, ancestor_mask, scale):
        last = keys.shape[1] - len(query) - 1
        if ancestor_mask is None or last < 0:
            return sound(query, keys, values, ancestor_mask, scale)
        kept = [i for i in range(keys.shape[1]) if i != last]
        return sound(query, keys[:, kept], values[:, kept], ancestor_mask, scale)

    monkeypatch.setattr(layers, "tree_attention", forgetful)
    where = wheres(engine_of(llama))
    assert "layer 0 attention: node 0" in where and "not what its path alone computes" in where


def test_an_mlp_that_mixes_neighbouring_rows(llama, monkeypatch):
    sound = MLP.forward

    def mixing(self, hidden):
        out = sound(self, hidden)
        return out if self is not llama.layers[1].mlp or len(out) < 8 else out + 0.2 * out.roll(1, 0)

    monkeypatch.setattr(MLP, "forward", mixing)
    where = wheres(engine_of(llama))
    assert "layer 1 MLP" in where or "prefill" in where


def test_positions_restart_in_the_second_prefill_chunk(llama, monkeypatch):
    sound = layers.RotaryEmbedding.forward

    def restarted(self, positions, dtype):
        chunk = len(positions) > 1 and bool((positions.diff() == 1).all()) and int(positions[0]) > 0
        return sound(self, positions - positions[0] if chunk and len(positions) < 5 else positions, dtype)

    monkeypatch.setattr(layers.RotaryEmbedding, "forward", restarted)
    assert not audited(engine_of(llama), plan=GREEDY).passed


def test_a_stop_string_read_only_at_the_end_of_a_round(llama, monkeypatch):
    sound = decode_round.scan

    def lazy(emitted, request, num_before):
        if request.watcher is None or len(emitted) < 2:
            return sound(emitted, request, num_before)
        found = sound(emitted[-1:], request, num_before + len(emitted) - 1)
        return found and type(found)(min(len(emitted), request.max_tokens - num_before), found.finish_reason)

    monkeypatch.setattr(decode_round, "scan", lazy)
    assert "stop: stop token" in wheres(engine_of(llama))


@pytest.mark.parametrize("which", ["conv", "state"])
def test_hybrid_commit_of_the_last_rows(hybrid, monkeypatch, which):
    name = "causal_conv_commit" if which == "conv" else "gated_delta_commit"
    sound = getattr(recurrent, name)

    def of_first_rows(*args):
        *rest, path = args
        return sound(*rest, torch.arange(len(path)))

    monkeypatch.setattr(recurrent, name, of_first_rows)
    where = wheres(engine_of(hybrid))
    assert f"layer 0 {'conv state' if which == 'conv' else 'recurrent state'} after commit of path" in where


@pytest.fixture
def with_adapter(llama):
    """A pair whose trees a random adapter ranks."""
    torch.manual_seed(5)
    drafter = drafter_for(llama.config)
    adapter = Adapter(AdapterConfig(drafter.config.hidden_size, drafter.config.block_size, 16, 8))
    for parameter in adapter.requires_grad_(False).parameters():
        parameter.normal_(0.0, 0.2)
    return engine_around(llama, Drafter(drafter, llama, Conditioning(adapter, llama, tables=False)))


def test_a_sound_pair_with_an_adapter_is_identical(with_adapter):
    result = audited(with_adapter, plan=GREEDY)
    assert result.passed and result.verdict == "identical", result.as_json()


def test_beside_an_adapter_the_drafters_faults_are_still_named(with_adapter, monkeypatch):
    sound = Drafter._candidates

    def turned(self, sequence, states, logits, depth):
        return sound(self, sequence, states, logits.roll(1, 0), depth)

    monkeypatch.setattr(Drafter, "_candidates", turned)
    assert "drafter candidates: depth 1 does not rank by slot 1's logits; they are slot" in wheres(with_adapter)
