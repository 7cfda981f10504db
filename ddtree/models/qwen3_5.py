"""Qwen3.5 and Qwen3.6 (dense): Gated-DeltaNet layers with a gated full-attention layer after every few of them.

Norms are zero-centred and fp32, rotary embedding turns a part of each head. Image positions (mrope) are those of plain
text here.
"""

from __future__ import annotations

from torch import nn

from ddtree.models.family_config import LINEAR
from ddtree.models.gated_attention import GatedAttention
from ddtree.models.gated_delta_net import GatedDeltaNet
from ddtree.models.layers import ZeroCentredRMSNorm
from ddtree.models.stack import Stack


class Qwen3_5(Stack):
    """A `TargetModel` for `Qwen3_5ForCausalLM`, also inside a multimodal checkpoint."""

    grouped_projections = False  # how the checkpoint keeps the input projections of linear layers

    def make_norm(self) -> nn.Module:
        return ZeroCentredRMSNorm(self.config.hidden_size, self.config.rms_norm_eps, self.device)

    def make_mixer(self, index: int) -> tuple[str, nn.Module]:
        config = self.config
        if config.layer_types[index] != LINEAR:
            return "self_attn", GatedAttention(config, self.device, self.dtype)
        return "linear_attn", GatedDeltaNet(
            config.hidden_size,
            config.linear_attention,
            config.rms_norm_eps,
            grouped=self.grouped_projections,
            device=self.device,
            dtype=self.dtype,
        )
