"""The parts that every decoder here is made of: norm, rotary embedding, attention, gated MLP.

Letters: R packed rows, C model width, H query heads, Hkv key/value heads, D head dim, F MLP width.

Modules are created without initial values; `checkpoint_tensors` names, as Hugging Face checkpoints do, the tensor
(often a slice of a fused weight) that each checkpoint tensor is copied into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ddtree.caches.rows import Span
from ddtree.kernels.tree_attention import tree_attention
from ddtree.models.rope import RopeConfig

MOST_FEW_ROWS = 12
NamedTensors = Iterator[tuple[str, torch.Tensor]]


class Linear(nn.Linear):
    """An `nn.Linear` without initial values, which would take longer to draw than to load."""

    def reset_parameters(self) -> None:
        pass

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., in_features] -> [.., out_features]."""
        if self._is_few_rows_on_cpu(hidden):
            return torch.mm(self.weight, hidden.t()).t().contiguous()
        return F.linear(hidden, self.weight, self.bias)

    def _is_few_rows_on_cpu(self, hidden: torch.Tensor) -> bool:
        # A small tree on a CPU: BLAS repacks the weight it multiplies by, so a wide weight has to come first.
        # 5 rows then take half the time, 9 rows two thirds; from about 16 on it is slower.
        return (
            hidden.ndim == 2
            and 1 < hidden.shape[0] <= MOST_FEW_ROWS
            and self.out_features > self.in_features
            and self.bias is None
            and hidden.device.type == "cpu"
            and hidden.dtype == torch.float32
        )


def linear(
    in_features: int, out_features: int, bias: bool, device: torch.device | str, dtype: torch.dtype
) -> Linear:
    """A linear layer without gradients; its values come from a checkpoint."""
    return Linear(in_features, out_features, bias=bias, device=device, dtype=dtype).requires_grad_(False)


def linear_tensors(prefix: str, module: nn.Linear, rows: slice = slice(None)) -> NamedTensors:
    """Names of a linear's weight and bias, or of the given output rows of a fused one."""
    yield f"{prefix}.weight", module.weight.data[rows]
    if module.bias is not None:
        yield f"{prefix}.bias", module.bias.data[rows]


def reorder_rows(module: nn.Linear, order: torch.Tensor) -> None:
    """Replace a linear's output rows by those of `order` [out_features] int64."""
    order = order.to(module.weight.device)
    module.weight.data = module.weight.data[order]
    if module.bias is not None:
        module.bias.data = module.bias.data[order]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, the division in fp32."""

    def __init__(self, dim: int, eps: float, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., dim] -> [.., dim]."""
        return rms_norm(hidden, self.weight, self.eps)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[.., dim] -> [.., dim]; `weight` is [dim] or broadcasts to `hidden`."""
    dim = (hidden.shape[-1],)
    if hidden.dtype == torch.float32:
        return F.rms_norm(hidden, dim, None, eps) * weight
    # The published models round to their dtype before they multiply by the weight.
    return F.rms_norm(hidden.float(), dim, None, eps).to(hidden.dtype) * weight


class ZeroCentredRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, in fp32 throughout; the weight is fp32 in any model."""

    def __init__(self, dim: int, eps: float, device: torch.device | str) -> None:
        super().__init__()
        weight = torch.empty(dim, device=device, dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", torch.empty_like(weight), persistent=False)
        self.eps = eps

    def finish_loading(self) -> None:
        """Derive 1 + weight from the loaded weight."""
        self.scale.copy_(1 + self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., dim] -> [.., dim]."""
        return zero_centred_norm(hidden, self.scale, self.eps)


def zero_centred_norm(hidden: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """[.., dim] -> [.., dim]; `scale` is 1 + weight in fp32, [dim] or broadcasting to `hidden`."""
    return (F.rms_norm(hidden.float(), (hidden.shape[-1],), None, eps) * scale).to(hidden.dtype)


class RotaryEmbedding(nn.Module):
    """cos and sin of each position's angles, computed in fp32 once per forward."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        super().__init__()
        frequencies, self.attention_factor = rope.frequencies(head_dim)
        # Each frequency turns two halves of the head; the first half's sine enters with a minus.
        half = frequencies.shape[0]
        sign = torch.ones(2 * half)
        sign[:half] = -1
        self.register_buffer(
            "frequencies", torch.cat((frequencies, frequencies)).to(device), persistent=False
        )
        self.register_buffer("sign", sign.to(device), persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`positions` [R] int64 -> (cos, signed sin), each [R, 1, rotary dim] in `dtype`, for `rotate`."""
        angles = positions.unsqueeze(-1).float() * self.frequencies
        cos, sin = angles.cos(), angles.sin() * self.sign
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate `heads` [R, H, D] by `rotary`; dimensions beyond the rotary dim pass through."""
    cos, sin = rotary
    rotary_dim = cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        turned = rotate(heads[..., :rotary_dim], rotary)
        return torch.cat((turned, heads[..., rotary_dim:]), dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cos, torch.cat((second, first), dim=-1), sin)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: Sequence[Span], layer: int, scale: float
) -> torch.Tensor:
    """`query` [R, H, D], `keys`, `values` [R, Hkv, D] -> [R, H, D]: each span's rows attend to what its cache of this layer has
    committed and, staged here, to their ancestors."""
    attended = []
    for span in spans:
        rows = slice(span.start, span.stop)
        seen = span.cache.layers[layer].stage(keys[rows], values[rows])
        attended.append(tree_attention(query[rows], *seen, span.ancestor_mask, scale))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


class Attention(nn.Module):
    """Grouped-query attention over packed rows; with `qk_norm_eps` each query and key head is normalised first."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        qk_norm_eps: float | None,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.qk_norm_eps = qk_norm_eps
        # One matrix for query, key and value: a third of the launches, and one long read of memory.
        self.qkv_proj = linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias, device, dtype)
        self.o_proj = linear(num_heads * head_dim, hidden_size, bias, device, dtype)
        if qk_norm_eps is not None:
            # The two norm weights, repeated per head, so that queries and keys are normalised together.
            qk_norm = torch.empty(num_heads + num_kv_heads, head_dim, device=device, dtype=dtype)
            self.qk_norm = nn.Parameter(qk_norm, requires_grad=False)

    def checkpoint_tensors(self, prefix: str) -> NamedTensors:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield from linear_tensors(f"{prefix}.q_proj", self.qkv_proj, slice(0, queries))
        yield from linear_tensors(f"{prefix}.k_proj", self.qkv_proj, slice(queries, queries + keys))
        yield from linear_tensors(f"{prefix}.v_proj", self.qkv_proj, slice(queries + keys, None))
        yield from linear_tensors(f"{prefix}.o_proj", self.o_proj)
        if self.qk_norm_eps is not None:
            yield f"{prefix}.q_norm.weight", self.qk_norm.data[0]
            yield f"{prefix}.k_norm.weight", self.qk_norm.data[self.num_heads]

    def finish_loading(self) -> None:
        """Repeat the norm weights over the heads, once their first rows are loaded."""
        if self.qk_norm_eps is not None:
            self.qk_norm.data[: self.num_heads] = self.qk_norm.data[0].clone()
            self.qk_norm.data[self.num_heads :] = self.qk_norm.data[self.num_heads].clone()

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
        turned, values = heads[:, :num_turned], heads[:, num_turned:]
        if self.qk_norm_eps is not None:
            turned = rms_norm(turned, self.qk_norm, self.qk_norm_eps)
        turned = rotate(turned, rotary)
        packed = attend(turned[:, : self.num_heads], turned[:, self.num_heads :], values, spans, layer, self.scale)
        return self.o_proj(packed.reshape(hidden.shape[0], -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_up_proj = linear(hidden_size, 2 * intermediate_size, bias, device, dtype)
        self.down_proj = linear(intermediate_size, hidden_size, bias, device, dtype)

    def checkpoint_tensors(self, prefix: str) -> NamedTensors:
        yield from linear_tensors(f"{prefix}.gate_proj", self.gate_up_proj, slice(0, self.intermediate_size))
        yield from linear_tensors(f"{prefix}.up_proj", self.gate_up_proj, slice(self.intermediate_size, None))
        yield from linear_tensors(f"{prefix}.down_proj", self.down_proj)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, C] -> [R, C]."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
