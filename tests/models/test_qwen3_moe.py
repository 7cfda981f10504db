"""Qwen3-MoE: against transformers and itself, weights of the chosen experts normalised and not."""

import torch

from ddtree.caches.kv import KVCache
from tests.closeness import assert_close
from tests.models.qwens import EXPERTS, reference
from tests.models.target_checks import AGAINST_TRANSFORMERS, TargetChecks
from tests.models.tiny import feed, random_ids, saved_and_loaded

CHANGES = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


class TestQwen3Moe(TargetChecks):
    FAMILY, CONFIG_CLASS = "Qwen3Moe", "Qwen3MoeConfig"
    CHANGES = {**CHANGES, "norm_topk_prob": True}

    def test_every_layer_is_full_attention(self, models):
        ours = models[1]
        assert not ours.config.is_hybrid
        assert {type(cache) for cache in ours.new_cache().layers} == {KVCache}


def test_weights_as_they_are_dense_layers_between_and_biases(tmp_path):
    changes = {**CHANGES, "norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True}
    theirs = reference("Qwen3Moe", "Qwen3MoeConfig", **changes)
    ours = saved_and_loaded(theirs, tmp_path)
    assert [type(layer.mlp).__name__ for layer in ours.layers] == ["MLP", "MoE", "MLP"]
    prompt = random_ids(70)
    with torch.inference_mode():
        expected = theirs(prompt[None]).logits[0]
    assert_close("logits", feed(ours, ours.new_cache(), prompt)[0], expected, AGAINST_TRANSFORMERS)
