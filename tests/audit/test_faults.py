"""Parts replaced by faulty ones, here and never in the product: the audit finds each and says where it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree.audit.plan import Plan
from ddtree.caches.kv import KVCache
from ddtree.caches.recurrent import RecurrentCache
from ddtree.engine import decode_round
from ddtree.engine.finish import scan
from ddtree.engine.target import Target
from ddtree.models import layers, stack
from ddtree.models.dflash import DFlash
from ddtree.models.layers import RotaryEmbedding
from ddtree.models.llama import Llama
from ddtree.models.rope import RopeConfig
from ddtree.tree.draft_tree import DraftTree
from tests.audit.pairs import audited, engine_of

PLAN = Plan(budgets=(0, 12), max_tokens=14)


def wheres(engine) -> str:
    result = audited(engine, plan=PLAN)
    assert not result.passed
    assert result.faults, result.divergences
    return " | ".join(fault.where for fault in result.faults)


def test_a_sound_pair_is_identical(llama):
    result = audited(engine_of(llama), plan=PLAN)
    assert result.passed and result.verdict == "identical", result.as_json()
    assert result.rounds_inspected >= 6 and result.tokens == 28 and 0 <= result.noise < 1e-4


def test_sibling_left_in_the_kv_cache(llama, monkeypatch):
    def keep_all(self, path):
        self.context_length += self._num_staged if len(path) else 0
        self._num_staged = 0

    monkeypatch.setattr(KVCache, "commit", keep_all)
    assert "layer 0 KV cache after commit" in (where := wheres(engine_of(llama))) and "sibling" in where


def test_first_rows_committed_instead_of_the_path(llama, monkeypatch):
    def first_rows(self, path):
        self.context_length += len(path)
        self._num_staged = 0

    monkeypatch.setattr(KVCache, "commit", first_rows)
    where = wheres(engine_of(llama))
    assert "layer 0 KV cache after commit" in where and "rejected sibling left in the cache" in where


def test_position_by_index(llama, monkeypatch):
    pack = Target._pack

    def by_index(self, sequences, trees):
        rows = pack(self, sequences, trees)
        start = sequences[0].context_length
        rows.positions.copy_(torch.arange(start, start + len(rows.positions)))
        return rows

    monkeypatch.setattr(Target, "_pack", by_index)
    assert "position: node" in wheres(engine_of(llama))


def test_position_wrong_inside_the_model(llama, monkeypatch):
    turn = RotaryEmbedding.forward

    def by_row(self, positions, dtype):
        return turn(self, positions.min() + torch.arange(len(positions)), dtype)

    monkeypatch.setattr(type(llama.rotary), "forward", by_row)
    assert "layer 0 position: node" in wheres(engine_of(llama))


@pytest.mark.parametrize(("change", "words"), [("self", "does not see itself"), ("sibling", "leaks into node")])
def test_ancestor_mask(llama, monkeypatch, change, words):
    sound = DraftTree.ancestor_mask

    def wrong(self):
        mask = sound(self)
        if change == "self":
            mask[np.arange(1, len(mask)), np.arange(1, len(mask))] = False
        else:
            mask |= (self.parents[:, None] == self.parents[None, :]) & np.tri(len(mask), dtype=bool)
        return mask

    monkeypatch.setattr(DraftTree, "ancestor_mask", wrong)
    where = wheres(engine_of(llama))
    assert "ancestor mask" in where and words in where


def test_sibling_leak_inside_attention(llama, monkeypatch):
    sound = layers.tree_attention

    def leaking(query, keys, values, ancestor_mask, scale):
        if ancestor_mask is not None:
            ancestor_mask = torch.tril(torch.ones_like(ancestor_mask))
        return sound(query, keys, values, ancestor_mask, scale)

    monkeypatch.setattr(layers, "tree_attention", leaking)
    where = wheres(engine_of(llama))
    assert "layer 0 attention" in where and "leaks into node" in where


def test_features_of_the_first_rows(llama, monkeypatch):
    sound = Target.commit

    def first_rows(self, sequences, paths):
        features, (start,) = self._features, self._starts
        (given,) = sound(self, sequences, paths)
        return [None if given is None else features[start : start + len(given)]]

    monkeypatch.setattr(Target, "commit", first_rows)
    assert "drafter features: those of nodes [0, 1" in wheres(engine_of(llama))


def test_taps_off_by_one_layer_in_the_engine(llama):
    engine = engine_of(llama)
    engine.target.feature_layers = (1, 1)
    assert "drafter taps" in wheres(engine)


def test_taps_off_by_one_layer_in_the_model(llama, monkeypatch):
    sound = Llama.forward

    def one_early(self, rows, feature_layers=()):
        return sound(self, rows, tuple(max(layer - 1, 0) for layer in feature_layers))

    monkeypatch.setattr(Llama, "forward", one_early)
    assert "drafter taps: tap 1 is layer 1's output, layer 2's is due" in wheres(engine_of(llama))


def test_mask_embedded_at_slot_0(llama, monkeypatch):
    sound = DFlash.embed_block

    def all_masks(self, root_tokens, target_model, num_slots=None):
        return sound(self, torch.full_like(root_tokens, self.config.mask_token_id), target_model, num_slots)

    monkeypatch.setattr(DFlash, "embed_block", all_masks)
    assert "drafter block: slot 0 embeds the mask token" in wheres(engine_of(llama))


def test_wrong_rope_theta_in_the_drafter(llama):
    engine = engine_of(llama)
    model = engine.drafter.model
    model.rotary = RotaryEmbedding(RopeConfig(1e4), model.config.head_dim, "cpu")
    where = wheres(engine)
    assert "drafter layer 0 RoPE" in where and "published 1e+07, the angles speak for 1e+04" in where


def test_stop_checked_on_the_last_token_only(llama, monkeypatch):
    def last_only(emitted, request, num_before):
        found = scan(emitted[-1:], request, num_before + len(emitted) - 1)
        if found is None:
            return None
        return type(found)(min(len(emitted), request.max_tokens - num_before), found.finish_reason, found.stop_reason)

    monkeypatch.setattr(decode_round, "scan", last_only)
    where = wheres(engine_of(llama))
    assert "stop: stop token" in where and "was passed over; the target alone would have stopped there" in where


def test_accepting_a_node_that_the_target_did_not_choose(llama, monkeypatch):
    sound = decode_round.accept

    def greedy_drafter(tree, target_tokens):
        if tree.num_nodes > 1:
            target_tokens = target_tokens.copy()
            target_tokens[0] = tree.token_ids[1]
        return sound(tree, target_tokens)

    monkeypatch.setattr(decode_round, "accept", greedy_drafter)
    assert "accept: emitted" in wheres(engine_of(llama))


def test_flattened_gated_delta(hybrid, monkeypatch):
    class Flattened(RecurrentCache):
        def stage(self, query, key, value, g, beta, ancestor_mask):
            return super().stage(query, key, value, g, beta, None)

    monkeypatch.setattr(stack, "RecurrentCache", Flattened)
    where = wheres(engine_of(hybrid))
    assert "layer 0 recurrent state" in where and "leaks into node" in where


def test_conv_window_by_row(hybrid, monkeypatch):
    class ByRow(RecurrentCache):
        def stage_conv(self, x, weight, bias, parents):
            return super().stage_conv(x, weight, bias, None)

    monkeypatch.setattr(stack, "RecurrentCache", ByRow)
    where = wheres(engine_of(hybrid))
    assert "layer 0 conv" in where and "leaks into node" in where


def test_recurrent_state_not_folded(hybrid, monkeypatch):
    class Forgetful(RecurrentCache):
        def commit(self, path):
            super().commit(path if len(path) < 3 or self.context_length == 0 else path[:-1])

    monkeypatch.setattr(stack, "RecurrentCache", Forgetful)
    assert "after commit of path" in wheres(engine_of(hybrid))
