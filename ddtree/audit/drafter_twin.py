"""A DFlash drafter computed a second time, plainly, from its published config and tensors alone.

Letters: T context tokens, K block slots, C model width, H query heads, Hkv key/value heads, D head dim, L layers,
F feature width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ddtree.models.drafter_config import DrafterConfig


class DrafterTwin:
    """Reads `config.raw` (what was published) and the tensors by their published names; in the tensors' dtype."""

    def __init__(self, model) -> None:
        raw = model.config.raw
        self.config = DrafterConfig.from_hf(raw)
        self.weights = dict(model.checkpoint_tensors())
        self.mask_token_id = published(raw, "mask_token_id")
        self.theta = published(raw, "rope_theta")
        self.layer_ids = published_layer_ids(raw)
        self.frequencies, self.factor = self._frequencies()

    def _frequencies(self) -> tuple[torch.Tensor, float]:
        rope, width = self.config.rope, self.config.head_dim
        if rope.rope_type == "default" and rope.partial_rotary_factor == 1.0:
            exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
            return (1.0 / float(self.theta) ** exponents).float(), 1.0
        return rope.frequencies(width)

    def context(self, features: torch.Tensor, first: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values [T, Hkv, D] of every layer, from features [T, F] of the tokens at first, first + 1, …"""
        projected = self._norm(self._linear("fc", features), "hidden_norm")
        positions = torch.arange(first, first + len(features), device=features.device)
        keys, values = [], []
        for layer in range(self.config.num_layers):
            name = f"layers.{layer}.self_attn"
            key = self._norm(self._heads(f"{name}.k_proj", projected), f"{name}.k_norm")
            keys.append(self._turn(key, positions))
            values.append(self._heads(f"{name}.v_proj", projected))
        return keys, values

    def block(self, hidden: torch.Tensor, keys, values) -> tuple[torch.Tensor, dict[tuple[int, str], torch.Tensor]]:
        """Block embeddings [K, C] beside the context's keys and values -> ([K, C], each part's result)."""
        parts, start = {}, len(keys[0])
        positions = torch.arange(start, start + len(hidden), device=hidden.device)
        for layer in range(self.config.num_layers):
            name = f"layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            query = self._turn(
                self._norm(self._heads(f"{name}.self_attn.q_proj", normed), f"{name}.self_attn.q_norm"), positions
            )
            key = self._turn(
                self._norm(self._heads(f"{name}.self_attn.k_proj", normed), f"{name}.self_attn.k_norm"), positions
            )
            value = self._heads(f"{name}.self_attn.v_proj", normed)
            seen = self._attend(layer, query, torch.cat((keys[layer], key)), torch.cat((values[layer], value)))
            parts[layer, "o_proj"] = self._linear(f"{name}.self_attn.o_proj", seen)
            hidden = hidden + parts[layer, "o_proj"]
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(f"{name}.mlp.gate_proj", normed))
            parts[layer, "mlp"] = self._linear(
                f"{name}.mlp.down_proj", gate * self._linear(f"{name}.mlp.up_proj", normed)
            )
            hidden = hidden + parts[layer, "mlp"]
        return self._norm(hidden, "norm"), parts

    def _attend(self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        num_slots, num_heads, width = query.shape
        group = num_heads // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("khd,shd->hks", query.float(), keys.float()) * width**-0.5
        rows = torch.arange(len(keys) - num_slots, len(keys), device=query.device)
        distance = rows[:, None] - torch.arange(len(keys), device=query.device)
        window, causal = self.config.window(layer), self.config.attends_causally(layer)
        hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (distance.abs() >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hks,shd->khd", weights, values.float()).to(query.dtype).reshape(num_slots, -1)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._linear(name, x).unflatten(-1, (-1, self.config.head_dim))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return scaled.to(x.dtype) * self.weights[f"{name}.weight"]

    def _turn(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the two halves of each head against one another."""
        frequencies = self.frequencies.to(heads.device)
        angles = positions[:, None].float() * frequencies
        cos = (angles.cos() * self.factor).to(heads.dtype)[:, None]
        sin = (angles.sin() * self.factor).to(heads.dtype)[:, None]
        half = frequencies.shape[0]
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def published(raw: Mapping[str, Any], key: str) -> Any:
    """A value of a drafter's config.json wherever its form keeps it; None if it has none."""
    stack = raw.get("transformer_layer_config") or {}
    for place in (raw.get("dflash_config"), raw.get("rope_parameters"), raw, stack, stack.get("rope_parameters")):
        if place and place.get(key) is not None:
            return place[key]
    return None


def published_layer_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Target layers whose output the drafter was trained on; speculators' form counts one higher."""
    ids = published(raw, "target_layer_ids")
    if ids is None:
        ids = [int(layer) - 1 for layer in published(raw, "aux_hidden_state_layer_ids")]
    return tuple(int(layer) for layer in ids)
