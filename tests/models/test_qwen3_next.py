"""Qwen3-Next: against transformers and itself, one layer without experts."""

from ddtree.models.qwen3_next import Qwen3Next
from tests.models.qwens import EXPERTS, LINEAR
from tests.models.target_checks import TargetChecks


class TestQwen3Next(TargetChecks):
    FAMILY, CONFIG_CLASS = "Qwen3Next", "Qwen3NextConfig"
    CHANGES = {
        **LINEAR,
        **EXPERTS,
        "shared_expert_intermediate_size": 24,
        "intermediate_size": 40,
        "mlp_only_layers": [1],
    }

    def test_the_layers_are_those_of_the_config(self, models):
        ours = models[1]
        assert type(ours) is Qwen3Next
        assert [type(layer.mlp).__name__ for layer in ours.layers] == ["MoE", "MLP", "MoE", "MoE"]
