"""Gated DeltaNet, the linear-attention layer of the hybrid Qwen families (docs/decode_round.md; design.md §3).

Letters: R packed rows, n rows of one span, C model width, Hk key heads, Hv value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ddtree.caches.rows import Span
from ddtree.models.family_config import LinearAttentionConfig
from ddtree.models.layers import NamedTensors, linear, linear_tensors, reorder_rows


class GatedDeltaNet(nn.Module):
    """Project, convolve, apply the gated delta rule, norm and gate, project back.

    `grouped`: the checkpoint (Qwen3-Next's) keeps two input projections with the rows of each key head's group
    together, instead of one projection per purpose.
    """

    def __init__(
        self,
        hidden_size: int,
        shape: LinearAttentionConfig,
        eps: float,
        *,
        grouped: bool,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.grouped = shape, eps, grouped
        # Queries, keys, values (the convolution's input), then z, b and a: one matrix. Published projections that
        # are grouped are brought into this order by `finish_loading`.
        self.sizes = (shape.conv_channels, shape.values_size, shape.num_value_heads, shape.num_value_heads)
        self.in_proj = linear(hidden_size, sum(self.sizes), False, device, dtype)
        self.out_proj = linear(shape.values_size, hidden_size, False, device, dtype)

        def parameter(*size: int, kind: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size, device=device, dtype=kind), requires_grad=False)

        self.conv_weight = parameter(shape.conv_channels, shape.conv_width, kind=dtype)
        # Published in fp32 or exact in it, and used in it: kept so whatever the model's dtype.
        self.A_log = parameter(shape.num_value_heads)
        self.dt_bias = parameter(shape.num_value_heads)
        self.norm = parameter(shape.value_dim)
        decay_rate = torch.empty(shape.num_value_heads, device=device, dtype=torch.float32)
        self.register_buffer("decay_rate", decay_rate, persistent=False)  # -exp(A_log)

    def checkpoint_tensors(self, prefix: str) -> NamedTensors:
        """Grouped projections: before `finish_loading` only."""
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        sizes = self.sizes
        if self.grouped:
            names = ("in_proj_qkvz", "in_proj_ba")
            sizes = (sum(self.sizes[:2]), sum(self.sizes[2:]))
        start = 0
        for name, size in zip(names, sizes, strict=True):
            yield from linear_tensors(f"{prefix}.{name}", self.in_proj, slice(start, start + size))
            start += size
        yield f"{prefix}.conv1d.weight", self.conv_weight.data.unsqueeze(1)
        yield f"{prefix}.A_log", self.A_log.data
        yield f"{prefix}.dt_bias", self.dt_bias.data
        yield f"{prefix}.norm.weight", self.norm.data
        yield from linear_tensors(f"{prefix}.out_proj", self.out_proj)

    def finish_loading(self) -> None:
        """Order the rows of grouped projections, once; derive the decay rate."""
        if self.grouped:
            reorder_rows(self.in_proj, _order_of_grouped_rows(self.shape))
        self.decay_rate.copy_(-self.A_log.exp())

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        spans: Sequence[Span],
        layer: int,
    ) -> torch.Tensor:
        """[R, C] -> [R, C]; stages the rows in each span's `RecurrentCache` of this layer. Positions, hence
        `rotary`, play no part: order is in the recurrence.
        """
        mixed, z, b, a = self.in_proj(hidden).split(self.sizes, dim=-1)
        log_decay = self.decay_rate * F.softplus(a.float() + self.dt_bias)
        beta = b.sigmoid()
        recalled = []
        for span in spans:
            rows = slice(span.start, span.stop)
            recalled.append(self._recall(mixed[rows], log_decay[rows], beta[rows], span, layer))
        packed = recalled[0] if len(recalled) == 1 else torch.cat(recalled)
        gated = self._norm_and_gate(packed, z.view(packed.shape))
        return self.out_proj(gated.view(hidden.shape[0], -1))

    def _recall(
        self, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, span: Span, layer: int
    ) -> torch.Tensor:
        """One span: `mixed` [n, 2*Hk*K + Hv*V], `log_decay` and `beta` [n, Hv] -> [n, Hv, V]."""
        shape, cache = self.shape, span.cache.layers[layer]
        convolved = cache.stage_conv(mixed, self.conv_weight, None, span.parents)
        query, key, value = convolved.split((shape.keys_size, shape.keys_size, shape.values_size), dim=-1)
        return cache.stage(
            query.unflatten(-1, (shape.num_key_heads, shape.key_dim)),
            key.unflatten(-1, (shape.num_key_heads, shape.key_dim)),
            value.unflatten(-1, (shape.num_value_heads, shape.value_dim)),
            log_decay,
            beta,
            span.ancestor_mask,
        )

    def _norm_and_gate(self, values: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMSNorm per head, then times silu(gate): [R, Hv, V] both -> [R, Hv, V]."""
        normed = F.rms_norm(values.float(), (values.shape[-1],), None, self.eps)
        # The published models round to their dtype before they multiply by the weight.
        return (normed.to(values.dtype) * self.norm * F.silu(gate.float())).to(values.dtype)


def _order_of_grouped_rows(shape: LinearAttentionConfig) -> torch.Tensor:
    """Which row of in_proj_qkvz ++ in_proj_ba is which of qkv ++ z ++ b ++ a: [rows] int64.

    Group by group (a key head and its value heads) the former have q, k, v, z; then, again by group, b and a.
    """
    values_per_key = shape.num_value_heads // shape.num_key_heads
    in_group = (shape.key_dim, shape.key_dim, *2 * (values_per_key * shape.value_dim,))
    num_wide = shape.num_key_heads * sum(in_group)
    wide = torch.arange(num_wide).view(shape.num_key_heads, -1)
    narrow = torch.arange(2 * shape.num_value_heads).view(shape.num_key_heads, -1) + num_wide
    parts = (*wide.split(in_group, dim=1), *narrow.split(values_per_key, dim=1))
    return torch.cat([part.flatten() for part in parts])
