"""Llama, and every model published as `LlamaForCausalLM`.

Letters: R packed rows, C model width, L feature layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ddtree.caches.kv import KVCache
from ddtree.caches.model_cache import ModelCache
from ddtree.caches.rows import Rows, Span
from ddtree.models.config import ModelConfig
from ddtree.models.layers import MLP, Attention, NamedTensors, RMSNorm, RotaryEmbedding, linear
from ddtree.models.target_model import ModelOutput


class LlamaLayer(nn.Module):
    """Attention, then the MLP, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device, dtype)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            device=device,
            dtype=dtype,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device, dtype)
        self.mlp = MLP(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias, device=device, dtype=dtype
        )

    def checkpoint_tensors(self, prefix: str) -> NamedTensors:
        yield f"{prefix}.input_layernorm.weight", self.input_layernorm.weight.data
        yield from self.self_attn.checkpoint_tensors(f"{prefix}.self_attn")
        yield f"{prefix}.post_attention_layernorm.weight", self.post_attention_layernorm.weight.data
        yield from self.mlp.checkpoint_tensors(f"{prefix}.mlp")

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        spans: Sequence[Span],
        layer: int,
    ) -> torch.Tensor:
        """[R, C] -> [R, C]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, spans, layer)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Llama(nn.Module):
    """A `TargetModel`. Created without values; `models.weights.fill` fills `checkpoint_tensors()`."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.device, self.dtype = torch.device(device), dtype
        embedding = torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.embed_tokens = nn.Parameter(embedding, requires_grad=False)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self.layers = nn.ModuleList(LlamaLayer(config, device, dtype) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device, dtype)
        self.lm_head = linear(config.hidden_size, config.vocab_size, False, device, dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens

    def checkpoint_tensors(self) -> NamedTensors:
        """Name and destination of every tensor that the checkpoint must hold."""
        yield "model.embed_tokens.weight", self.embed_tokens.data
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint_tensors(f"model.layers.{index}")
        yield "model.norm.weight", self.norm.weight.data
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head.weight.data

    def finish_loading(self) -> None:
        """Derive what is not in the checkpoint as such."""
        for layer in self.layers:
            layer.self_attn.finish_loading()

    def new_cache(self) -> ModelCache:
        """An empty cache for one sequence."""
        config = self.config
        return ModelCache(
            [KVCache(config.num_kv_heads, config.head_dim, self.dtype, self.device) for _ in self.layers]
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[..] int64 -> [.., C]."""
        return F.embedding(token_ids, self.embed_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., C] after the final norm -> [.., V]."""
        return self.lm_head(hidden)

    def forward(self, rows: Rows, feature_layers: Sequence[int] = ()) -> ModelOutput:
        """Stage `rows` in their caches and compute them.

        Feature layer L means the output of layer L, i.e. `hidden_states[L + 1]` of transformers; like there, the
        last layer's output is taken after the final norm. ValueError on a layer that does not exist.
        """
        num_layers = len(self.layers)
        for layer in feature_layers:
            if not 0 <= layer < num_layers:
                raise ValueError(
                    f"feature layer {layer} does not exist; the target has layers 0 to {num_layers - 1}"
                )
        hidden = self.embed(rows.token_ids)
        rotary = self.rotary(rows.positions, hidden.dtype)
        wanted, outputs = set(feature_layers), {}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, rows.spans, index)
            if index in wanted:
                outputs[index] = hidden
        hidden = self.norm(hidden)
        if num_layers - 1 in wanted:
            outputs[num_layers - 1] = hidden
        features = torch.cat([outputs[layer] for layer in feature_layers], dim=-1) if wanted else None
        return ModelOutput(hidden, features)
