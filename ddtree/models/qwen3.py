"""Qwen3 (dense): Llama with a norm on each query and key head, and a head dim of its own.

The config says so: `ModelConfig.from_hf` sets `qk_norm` and takes `head_dim` from the checkpoint, never from
hidden_size / num_attention_heads, which Qwen3 does not keep to.
"""

from __future__ import annotations

import torch

from ddtree.models.config import ModelConfig
from ddtree.models.llama import Llama


class Qwen3(Llama):
    """A `TargetModel` for `Qwen3ForCausalLM`."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        assert config.qk_norm, "a Qwen3 config has qk_norm set"
        super().__init__(config, device, dtype)
