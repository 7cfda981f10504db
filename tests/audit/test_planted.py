"""More faults that no part of the audit was written for: on trees, commits, drafters, experts, long contexts and packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree.audit.plan import Plan
from ddtree.audit.stopping import stop_string_fault
from ddtree.caches.kv import KVCache
from ddtree.caches.model_cache import ModelCache
from ddtree.caches.recurrent import RecurrentCache
from ddtree.engine.drafter import Drafter
from ddtree.engine.target import Target
from ddtree.models import layers, stack
from ddtree.models.dflash import DFlash
from ddtree.models.layers import RMSNorm, RotaryEmbedding
from ddtree.models.moe import MoE
from ddtree.models.registry import load_target
from ddtree.text import Tokenizer
from ddtree.text.stops import StopStrings
from tests.audit.pairs import audited, engine_of
from tests.models.qwens import EXPERTS
from tests.models.qwens import reference as qwen_reference
from tests.models.tiny import reference
from tests.text.conftest import KINDS

PLAN = Plan(budgets=(0, 12), max_tokens=14)


def found(engine, plan=PLAN):
    result = audited(engine, plan=plan)
    assert not result.passed and result.exit_status
    return result


def wheres(engine, plan=PLAN) -> str:
    return " | ".join(fault.where for fault in found(engine, plan).faults)


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("qwen3")
    reference("Qwen3", head_dim=16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("moe")
    qwen_reference("Qwen3Moe", "Qwen3MoeConfig", **EXPERTS, num_hidden_layers=3, decoder_sparse_step=1).save_pretrained(folder)
    return folder


def of(folder):
    return load_target(folder, "cpu", torch.float32)


def test_query_heads_share_the_wrong_keys_on_tree_rows(llama, monkeypatch):
    sound = layers.tree_attention

    def interleaved(query, keys, values, ancestor_mask, scale):
        if ancestor_mask is None:
            return sound(query, keys, values, ancestor_mask, scale)
        order = torch.arange(query.shape[1]).view(len(keys), -1).T.flatten()
        out = torch.empty_like(query)
        out[:, order.argsort()] = sound(query[:, order.argsort()], keys, values, ancestor_mask, scale)
        return out

    monkeypatch.setattr(layers, "tree_attention", interleaved)
    where = wheres(engine_of(llama))
    assert "layer 0 attention: node 0" in where and "not what its path alone computes" in where


def test_ancestors_turned_into_descendants_below_depth_1(llama, monkeypatch):
    sound = layers.tree_attention

    def transposed(query, keys, values, ancestor_mask, scale):
        if ancestor_mask is not None:
            deep = (ancestor_mask.sum(1) > 2)[:, None]
            ancestor_mask = torch.where(deep, ancestor_mask.T, ancestor_mask)
        return sound(query, keys, values, ancestor_mask, scale)

    monkeypatch.setattr(layers, "tree_attention", transposed)
    where = wheres(engine_of(llama))
    assert "layer 0 attention" in where and ("does not see its ancestor" in where or "leaks into node" in where)


def test_keys_are_not_normalised_on_tree_rows(qwen_folder, monkeypatch):
    model, sound = of(qwen_folder), layers.Attention.forward

    def skipping(self, hidden, rotary, spans, layer):
        norm = self.qk_norm.clone()
        if spans[0].ancestor_mask is not None:
            self.qk_norm[-self.num_kv_heads :] = 1.0
        out = sound(self, hidden, rotary, spans, layer)
        self.qk_norm.copy_(norm)
        return out

    monkeypatch.setattr(layers.Attention, "forward", skipping)
    assert "layer 0 keys: node 0's are not what its path alone computes" in wheres(engine_of(model))


def test_experts_of_the_average_row(moe_folder, monkeypatch):
    model, sound = of(moe_folder), MoE._route
    monkeypatch.setattr(MoE, "_route", lambda self, hidden: sound(self, hidden.mean(0, keepdim=True).expand_as(hidden)))
    where = wheres(engine_of(model))
    assert "layer 0 MLP" in where


def test_beta_before_its_sigmoid_on_tree_rows(hybrid, monkeypatch):
    class Raw(RecurrentCache):
        def stage(self, query, key, value, g, beta, ancestor_mask):
            return super().stage(query, key, value, g, beta if ancestor_mask is None else beta.logit(), ancestor_mask)

    monkeypatch.setattr(stack, "RecurrentCache", Raw)
    where = wheres(engine_of(hybrid))
    assert "layer 0 recurrent state: node 0" in where


def test_conv_commit_keeps_one_input_too_few(hybrid, monkeypatch):
    class Short(RecurrentCache):
        def commit(self, path):
            super().commit(path)
            if len(path) and self.context_length > 12:
                self.conv_state[0] = 0

    monkeypatch.setattr(stack, "RecurrentCache", Short)
    # The reference of commits commits in the same way; the path run in one piece does not.
    assert "layer 0 conv: node 0 (depth 0) is not what its path alone computes" in wheres(engine_of(hybrid))


def test_the_last_node_of_a_path_is_not_committed(llama, monkeypatch):
    sound = KVCache.commit

    def dropping(self, path):
        length = self.context_length
        sound(self, path[:-1] if 1 < len(path) < self._num_staged else path)
        self.context_length = length + len(path)

    monkeypatch.setattr(KVCache, "commit", dropping)
    assert "layer 0 KV cache after commit of path" in wheres(engine_of(llama))


def test_a_length_that_counts_one_token_too_few(llama, monkeypatch):
    sound = ModelCache.commit

    def short(self, path):
        sound(self, path)
        self._context_length -= len(path) > 2 and self._context_length > 12

    monkeypatch.setattr(ModelCache, "commit", short)
    assert "the cache says context length" in wheres(engine_of(llama))


def test_position_off_by_one_past_64_tokens(llama, monkeypatch):
    pack = Target._pack

    def late(self, sequences, trees):
        rows = pack(self, sequences, trees)
        rows.positions.add_((rows.positions > 64).long())
        return rows

    monkeypatch.setattr(Target, "_pack", late)
    assert "position: node" in wheres(engine_of(llama))


def test_rotary_off_by_one_on_tree_rows_past_64_tokens(llama, monkeypatch):
    sound = RotaryEmbedding.forward

    def late(self, positions, dtype):
        siblings = len(positions) > 1 and bool((positions.diff() < 1).any())
        return sound(self, positions + ((positions > 64) & siblings), dtype)

    monkeypatch.setattr(type(llama.rotary), "forward", late)
    assert "layer 0 position: node" in wheres(engine_of(llama))


def test_a_cache_that_grows_forgets_its_last_row(llama, monkeypatch):
    sound = KVCache._grow

    def forgetful(self, needed):
        sound(self, needed)
        self._keys[:, max(self.context_length - 1, 0)] = 0

    monkeypatch.setattr(KVCache, "_grow", forgetful)
    result = found(engine_of(llama), Plan(budgets=(0, 12), max_tokens=24))
    assert "layer 0" in " ".join(fault.where for fault in result.faults)


def test_the_drafter_context_is_not_emptied_between_requests(llama, monkeypatch):
    sound = Drafter.open

    def reusing(self, sequence):
        if not hasattr(self, "kept"):
            sound(self, sequence)
            self.kept = sequence.drafter_state
        sequence.drafter_state = self.kept

    monkeypatch.setattr(Drafter, "open", reusing)
    result = found(engine_of(llama))
    assert (result.verdict, result.drafter, result.exit_status) == ("identical", "faulty", 3)
    assert "drafter layer 0 context" in result.faults[0].where and "rows for" in result.faults[0].where


def test_the_drafter_applies_its_final_norm_twice(llama, monkeypatch):
    sound = DFlash.forward
    monkeypatch.setattr(DFlash, "forward", lambda self, block, caches: self.norm(sound(self, block, caches)))
    result = found(engine_of(llama))
    assert result.drafter == "faulty" and "drafter block: its final hidden states" in result.faults[0].where


def test_the_drafter_drops_the_norm_of_its_features(llama, monkeypatch):
    engine = engine_of(llama)
    own, sound = engine.drafter.model.hidden_norm, RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, hidden: hidden if self is own else sound(self, hidden))
    assert "drafter layer 0 context: the values of token 0" in wheres(engine)


def test_the_drafter_keys_are_not_normalised(llama, monkeypatch):
    sound = DFlash.project_context

    def unscaled(self, features, positions):
        keys, values = sound(self, features, positions)
        return keys * 1.1, values

    monkeypatch.setattr(DFlash, "project_context", unscaled)
    assert "drafter layer 0 context: the keys of token 0" in wheres(engine_of(llama))


def test_packed_requests_choose_from_the_first_ones_rows(llama, monkeypatch):
    sound = Target.verify

    def mixed(self, sequences, trees):
        tokens = sound(self, sequences, trees)
        return [tokens[0][: len(tree.token_ids)] if len(tokens[0]) >= len(tree.token_ids) else own for tree, own in zip(trees, tokens, strict=True)]

    monkeypatch.setattr(Target, "verify", mixed)
    result = found(engine_of(llama))
    assert "side by side" in result.divergences[0].against
    assert "its logits choose token" in result.divergences[0].where


def test_packed_requests_see_each_other(llama, monkeypatch):
    sound = Target._pack

    def mixed(self, sequences, trees):
        rows = sound(self, sequences, trees)
        if len(sequences) > 1:
            rows.positions[rows.spans[1].start :] += 1
        return rows

    monkeypatch.setattr(Target, "_pack", mixed)
    assert "position: node 0" in found(engine_of(llama)).divergences[0].where


def test_packed_requests_are_fed_each_others_features(llama, monkeypatch):
    sound = Target.commit

    def swapped(self, sequences, paths):
        features = sound(self, sequences, paths)
        if len(features) == 2 and None not in features:
            features = [features[1][: len(paths[0])], features[0][: len(paths[1])]]
            features = [np.resize(each.numpy(), (len(path), each.shape[1])) for each, path in zip(features, paths, strict=True)]
            features = [torch.from_numpy(each) for each in features]
        return features

    monkeypatch.setattr(Target, "commit", swapped)
    result = found(engine_of(llama))
    assert result.verdict == "identical" and result.drafter == "faulty"
    assert "drafter features" in result.faults[0].where


def test_counts_that_are_not_the_tokens(llama, monkeypatch):
    from ddtree.engine import engine as module

    sound = module.record

    def generous(sequence, *rest):
        sound(sequence, *rest)
        sequence.stats.output_tokens += sequence.stats.decode_rounds == 2

    monkeypatch.setattr(module, "record", generous)
    assert "counts: output_tokens is" in wheres(engine_of(llama))


def test_a_stop_string_across_tokens_is_not_matched(monkeypatch):
    tokenizer = Tokenizer(KINDS["split_digits"]())
    plain = tokenizer.encode("hello world and hello again, the words go on for a while", add_special_tokens=False)

    def generate(watcher):
        return plain[: next((n for n, token_id in enumerate(plain, start=1) if watcher.feed(token_id)), len(plain))]

    assert stop_string_fault(tokenizer, plain, frozenset(), generate) is None
    # An answer that is wrong from its first token on is no fault of stops.
    others = tokenizer.encode("something else is said here, at some length too, so that it goes on", add_special_tokens=False)
    assert stop_string_fault(tokenizer, plain, frozenset(), lambda watcher: others) is None
    assert "stopped there" in stop_string_fault(tokenizer, plain, frozenset(), lambda watcher: [others[0], *plain])
    sound = StopStrings.feed
    monkeypatch.setattr(
        StopStrings, "feed", lambda self, text, *rest, **options: (text, None) if len(text) < 9 else sound(self, text, *rest, **options)
    )
    found = stop_string_fault(tokenizer, plain, frozenset(), generate)
    assert "is complete with answer token" in found and "the target alone would have stopped there" in found
