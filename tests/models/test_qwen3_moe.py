"""Qwen3-MoE: against transformers and itself, weights of the chosen experts normalised and not."""

from ddtree.caches.kv import KVCache
from tests.models.qwens import EXPERTS
from tests.models.target_checks import TargetChecks

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


class TestWeightsAsTheyAre(TargetChecks):
    FAMILY, CONFIG_CLASS = "Qwen3Moe", "Qwen3MoeConfig"
    CHANGES = {**CHANGES, "decoder_sparse_step": 2, "attention_bias": True}

    def test_the_layers_are_those_of_the_config(self, models):
        assert [type(layer.mlp).__name__ for layer in models[1].layers] == ["MLP", "MoE", "MLP"]
