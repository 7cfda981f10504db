"""The full-attention layer of the hybrid Qwen families: grouped-query attention whose output is gated.

Letters: R packed rows, C model width, H query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ddtree.caches.rows import Span
from ddtree.models.config import ModelConfig
from ddtree.models.layers import (
    NamedTensors,
    attend,
    linear,
    linear_tensors,
    reorder_rows,
    rotate,
    zero_centred_norm,
)


class GatedAttention(nn.Module):
    """Attention with zero-centred norms on query and key heads, and a sigmoid gate per output element."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.scale = self.head_dim**-0.5
        # Query, key, value and gate in one matrix; the checkpoint's order until `finish_loading`.
        num_rows = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        self.qkv_proj = linear(config.hidden_size, num_rows, config.attention_bias, device, dtype)
        self.o_proj = linear(
            self.num_heads * self.head_dim, config.hidden_size, config.attention_bias, device, dtype
        )

        def norm_weight(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, device=device, dtype=torch.float32)

        self.q_norm = nn.Parameter(norm_weight(self.head_dim), requires_grad=False)
        self.k_norm = nn.Parameter(norm_weight(self.head_dim), requires_grad=False)
        # 1 + weight per head, so that queries and keys are normalised together.
        qk_scale = norm_weight(self.num_heads + self.num_kv_heads, self.head_dim)
        self.register_buffer("qk_scale", qk_scale, persistent=False)

    def checkpoint_tensors(self, prefix: str) -> NamedTensors:
        """Before `finish_loading` only: q_proj's rows are each head's query, then its gate."""
        queries, keys = 2 * self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield from linear_tensors(f"{prefix}.q_proj", self.qkv_proj, slice(0, queries))
        yield from linear_tensors(f"{prefix}.k_proj", self.qkv_proj, slice(queries, queries + keys))
        yield from linear_tensors(f"{prefix}.v_proj", self.qkv_proj, slice(queries + keys, None))
        yield from linear_tensors(f"{prefix}.o_proj", self.o_proj)
        yield f"{prefix}.q_norm.weight", self.q_norm.data
        yield f"{prefix}.k_norm.weight", self.k_norm.data

    def finish_loading(self) -> None:
        """Bring the heads into the order query, key, value, gate, once; derive the norms' scale."""
        heads = torch.arange(2 * (self.num_heads + self.num_kv_heads))
        interleaved = 2 * self.num_heads
        heads = torch.cat((heads[0:interleaved:2], heads[interleaved:], heads[1:interleaved:2]))
        rows = heads.unsqueeze(1) * self.head_dim + torch.arange(self.head_dim)
        reorder_rows(self.qkv_proj, rows.flatten())
        self.qk_scale[: self.num_heads] = 1 + self.q_norm
        self.qk_scale[self.num_heads :] = 1 + self.k_norm

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        spans: Sequence[Span],
        layer: int,
    ) -> torch.Tensor:
        """[R, C] -> [R, C]; stages the rows' keys and values in each span's cache of this layer."""
        heads = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        num_turned = self.num_heads + self.num_kv_heads
        turned, values, gate = heads.split((num_turned, self.num_kv_heads, self.num_heads), dim=1)
        turned = rotate(zero_centred_norm(turned, self.qk_scale, self.eps), rotary)
        packed = attend(turned[:, : self.num_heads], turned[:, self.num_heads :], values, spans, layer, self.scale)
        return self.o_proj((packed * gate.sigmoid()).reshape(hidden.shape[0], -1))
