"""The frozen target as plain tensors: a dense batched forward with taps, and one decode step for sampling.

The served target runs packed rows over caches; here all sequences have the same length, so one causal attention
does. Both read the same weights, and `tests/training/test_features.py` holds them equal.
Letters: B sequences, T tokens, C model width, H query heads, G key-value heads, D head dim, L taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """Weights of one decoder layer; qk_norm is None for Llama."""

    input_norm: torch.Tensor  # [C]
    qkv: torch.Tensor  # [(H + 2G) D, C]
    qk_norm: torch.Tensor | None  # [H + G, D]
    output: torch.Tensor  # [C, H D]
    post_norm: torch.Tensor  # [C]
    gate_up: torch.Tensor  # [2 I, C]
    down: torch.Tensor  # [C, I]


def rotary_table(rope, head_dim: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[length, D]` float32 of the half-split rotation; the angles are computed in float64.

    `rope` is the target's `RopeConfig`.
    """
    frequencies, factor = rope.frequencies(head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies.double())
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * factor).float().to(device), (angles.sin() * factor).float().to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x [..., D]` by `cos`, `sin` (broadcast, dtype of x)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class DenseTarget:
    """Dense forward of a frozen target; holds the module's own tensors, cast to `dtype` where they differ."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        config = model.config
        self.config, self.dtype = config, dtype
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.embedding, self.layers, self.final_norm, self.head = read_weights(model, dtype)
        self.device = self.embedding.device
        # half-precision logits keep three more bits than bfloat16: fewer false ties under argmax
        self.head_dtype = torch.float16 if dtype == torch.bfloat16 and self.device.type == "cuda" else dtype
        self.logits_head = self.head.to(self.head_dtype)
        self.cos, self.sin = rotary_table(config.rope, self.head_dim, 1024, self.device)

    def rotary(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[>= length, D]` in float32, grown by need."""
        if self.cos.shape[0] < length:
            self.cos, self.sin = rotary_table(self.config.rope, self.head_dim, length, self.device)
        return self.cos, self.sin

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[...]` ids to `[..., C]`."""
        return F.embedding(token_ids, self.embedding)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (weight.shape[0],), weight, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., C]` after the final norm to `[..., V]`."""
        return F.linear(hidden.to(self.head_dtype), self.logits_head)

    def project(self, layer: DenseLayer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """Rotated queries `[B, T, H, D]`, rotated keys and values `[B, T, G, D]` of `x [B, T, C]`."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        mixed = F.linear(self.norm(x, layer.input_norm), layer.qkv).unflatten(-1, (-1, self.head_dim))
        query_key, value = mixed[..., : heads + kv_heads, :], mixed[..., heads + kv_heads :, :]
        if layer.qk_norm is not None:
            query_key = F.rms_norm(query_key, (self.head_dim,), None, self.eps) * layer.qk_norm
        query_key = rotate(query_key, cos, sin)
        return query_key[..., :heads, :], query_key[..., heads:, :], value

    def mix(self, layer: DenseLayer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Close the layer: output projection of `attended [B, T, H D]`, then the MLP."""
        x = x + F.linear(attended, layer.output)
        gate, up = F.linear(self.norm(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    @torch.no_grad()
    def forward(self, token_ids: torch.Tensor, taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, T]` ids to the taps' features `[B, T, L C]` and the hidden states after the final norm `[B, T, C]`.

        Tap i is the output of layer i.
        """
        return self.run(token_ids, taps, len(self.layers))

    @torch.no_grad()
    def features(self, token_ids: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
        """`[B, T]` ids to the taps' features `[B, T, L C]`; stops at the last tap."""
        return self.run(token_ids, taps, max(taps) + 1)[0]

    def run(self, token_ids: torch.Tensor, taps: tuple[int, ...], depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = token_ids.shape[1]
        cos, sin = (table[:length, None].to(self.dtype) for table in self.rotary(length))
        x, outputs = self.embed(token_ids), {}
        for index, layer in enumerate(self.layers[:depth]):
            query, key, value = (part.transpose(1, 2) for part in self.project(layer, x, cos, sin))
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads
            )
            x = self.mix(layer, x, attended.transpose(1, 2).flatten(-2))
            if index in taps:
                # as in the served model, the last layer's output is taken after the final norm
                outputs[index] = self.norm(x, self.final_norm) if index == len(self.layers) - 1 else x
        taken = [outputs[tap] for tap in taps]
        return torch.cat(taken, dim=-1) if taken else x[..., :0], self.norm(x, self.final_norm)


def read_weights(model: torch.nn.Module, dtype: torch.dtype):
    """Embedding `[V, C]`, layers, final norm `[C]` and head `[V, C]` of a served Llama or Qwen3."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(dtype)

    biased = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    if biased:
        raise ValueError(f"targets with biases are not supported in training, found {biased[0]}")
    layers = [
        DenseLayer(
            input_norm=take(layer.input_layernorm.weight),
            qkv=take(layer.self_attn.qkv_proj.weight),
            qk_norm=take(layer.self_attn.qk_norm) if model.config.qk_norm else None,
            output=take(layer.self_attn.o_proj.weight),
            post_norm=take(layer.post_attention_layernorm.weight),
            gate_up=take(layer.mlp.gate_up_proj.weight),
            down=take(layer.mlp.down_proj.weight),
        )
        for layer in model.layers
    ]
    return take(model.embed_tokens), layers, take(model.norm.weight), take(model.lm_head.weight)
