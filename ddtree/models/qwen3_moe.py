"""Qwen3-MoE (30B-A3B, Qwen3-Coder-30B-A3B, ...): Qwen3's attention, with routed experts in the MLP's place."""

from __future__ import annotations

from torch import nn

from ddtree.models.layers import Attention, RMSNorm
from ddtree.models.stack import Stack


class Qwen3Moe(Stack):
    """A `TargetModel` for `Qwen3MoeForCausalLM`."""

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, self.device, self.dtype)

    def make_mixer(self, index: int) -> tuple[str, nn.Module]:
        config = self.config
        return "self_attn", Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps,
            device=self.device,
            dtype=self.dtype,
        )
