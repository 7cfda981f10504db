"""Qwen3.5 and Qwen3.6 with experts (35B-A3B, ...): the dense stack with a routed and a shared MLP in each layer."""

from __future__ import annotations

import torch

from ddtree.models.config import ModelConfig
from ddtree.models.qwen3_5 import Qwen3_5


class Qwen3_5Moe(Qwen3_5):
    """A `TargetModel` for `Qwen3_5MoeForCausalLM`, also inside a multimodal checkpoint."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        assert config.moe is not None, "a Qwen3.5-MoE config has experts"
        super().__init__(config, device, dtype)
