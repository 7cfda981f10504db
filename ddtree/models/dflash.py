"""DFlash, the drafter: fills a block of mask tokens in one pass, beside the target's features (arXiv 2602.06036).

Letters: B sequences, K block slots (slot 0 is the root), R = B * K rows, T context tokens, C model width,
H query heads, Hkv key/value heads, D head dim, V target vocabulary, F = len(target_layer_ids) * C.

Context tokens never pass through the layers: `absorb` projects their target features once, and every layer keys
and values that projection (KV injection). The block attends to the context and to itself and leaves no trace.
Embedding and head are the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddtree.caches.kv import KVCache
from ddtree.caches.model_cache import ModelCache
from ddtree.models.block_attention import CachedBlockAttention
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.drafter_files import open_drafter
from ddtree.models.layers import (
    MLP,
    NamedTensors,
    RMSNorm,
    RotaryEmbedding,
    linear,
    linear_tensors,
    rms_norm,
    rotate,
)
from ddtree.models.weights import fill

# (layer, query [R, H, D], keys [R, Hkv, D], values [R, Hkv, D]) -> [R, H * D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DFlashLayer(nn.Module):
    """One layer, but for its q, k and v weights, which `DFlash` holds stacked over the layers."""

    def __init__(self, config: DrafterConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps, device, dtype)
        self.o_proj = linear(config.num_heads * config.head_dim, width, config.attention_bias, device, dtype)
        self.post_attention_layernorm = RMSNorm(width, eps, device, dtype)
        self.mlp = MLP(width, config.intermediate_size, bias=False, device=device, dtype=dtype)

    def checkpoint_tensors(self, prefix: str) -> NamedTensors:
        yield f"{prefix}.input_layernorm.weight", self.input_layernorm.weight.data
        yield from linear_tensors(f"{prefix}.self_attn.o_proj", self.o_proj)
        yield f"{prefix}.post_attention_layernorm.weight", self.post_attention_layernorm.weight.data
        yield from self.mlp.checkpoint_tensors(f"{prefix}.mlp")


class DFlash(nn.Module):
    """A drafter without values; `load_drafter` fills it. `own_head`: it brings a head over its draft vocabulary."""

    def __init__(
        self,
        config: DrafterConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        own_head: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.query_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        width, num_layers = config.hidden_size, config.num_layers

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        self.fc = linear(len(config.target_layer_ids) * width, width, False, device, dtype)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps, device, dtype)
        # Stacked, so that a layer's block rows take one product, and the context one product for all layers.
        self.qkv_weight = parameter(num_layers, self.query_size + 2 * self.kv_size, width)
        self.qkv_bias = parameter(num_layers, self.qkv_weight.shape[1]) if config.attention_bias else None
        self.q_norm = parameter(num_layers, config.head_dim)
        self.k_norm = parameter(num_layers, config.head_dim)
        self.layers = nn.ModuleList(DFlashLayer(config, device, dtype) for _ in range(num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps, device, dtype)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self.lm_head = linear(width, config.draft_vocab_size, False, device, dtype) if own_head else None
        draft_token_ids = None  # [draft_vocab_size] int64: the target's id of each draft token
        if config.draft_vocab_size is not None:
            draft_token_ids = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=device)
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def checkpoint_tensors(self) -> NamedTensors:
        """z-lab's name of every tensor, with the view it is loaded into and saved from."""
        yield from linear_tensors("fc", self.fc)
        yield "hidden_norm.weight", self.hidden_norm.weight.data
        yield "norm.weight", self.norm.weight.data
        if self.lm_head is not None:
            yield from linear_tensors("lm_head", self.lm_head)
        bounds = (0, self.query_size, self.query_size + self.kv_size, self.query_size + 2 * self.kv_size)
        for i, layer in enumerate(self.layers):
            attention = f"layers.{i}.self_attn"
            for name, start, stop in zip(("q_proj", "k_proj", "v_proj"), bounds, bounds[1:], strict=False):
                yield f"{attention}.{name}.weight", self.qkv_weight.data[i, start:stop]
                if self.qkv_bias is not None:
                    yield f"{attention}.{name}.bias", self.qkv_bias.data[i, start:stop]
            yield f"{attention}.q_norm.weight", self.q_norm.data[i]
            yield f"{attention}.k_norm.weight", self.k_norm.data[i]
            yield from layer.checkpoint_tensors(f"layers.{i}")

    def new_cache(self) -> ModelCache:
        """One sequence's committed context: a KVCache per layer."""
        config = self.config
        return ModelCache(
            [KVCache(config.num_kv_heads, config.head_dim, self.dtype, self.device) for _ in self.layers]
        )

    @torch.no_grad()
    def absorb(self, features: torch.Tensor, cache: ModelCache) -> None:
        """Enter target features [T, F] of committed tokens, permanent at once; they follow those already there.

        Raises:
            ValueError: the features are not F wide.
        """
        num_tokens, width = features.shape
        if width != self.fc.in_features:
            raise ValueError(
                f"target features are {width} wide, the drafter's fc takes {self.fc.in_features}"
            )
        start = cache.context_length
        rows = torch.arange(num_tokens, device=features.device)
        keys, values = self.project_context(features, rows + start)
        for i, layer_cache in enumerate(cache.layers):
            layer_cache.stage(keys[i], values[i])
        cache.commit(rows)

    def project_context(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every layer's keys and values of context tokens.

        Args:
            features: [T, F].
            positions: [T] int64.

        Returns:
            Keys and values, each [L, T, Hkv, D] for L layers.
        """
        config, (num_layers, _, _) = self.config, self.qkv_weight.shape
        context = self.hidden_norm(self.fc(features))
        weight = self.qkv_weight[:, self.query_size :].transpose(1, 2)
        projected = torch.bmm(context.expand(num_layers, -1, -1), weight)
        if self.qkv_bias is not None:
            projected = projected + self.qkv_bias[:, None, self.query_size :]
        heads = projected.view(num_layers, len(features), 2 * config.num_kv_heads, config.head_dim)
        keys, values = heads.chunk(2, dim=2)
        keys = rms_norm(keys, self.k_norm[:, None, None], config.rms_norm_eps)
        return rotate(keys, self.rotary(positions, keys.dtype)), values

    def run_layers(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Block rows [R, C] at `positions` [R] int64 through all layers and the final norm -> [R, C].

        `attend` is what differs between serving (caches) and training (a mask over packed blocks).
        """
        config, num_heads = self.config, self.config.num_heads
        rotary = self.rotary(positions, hidden.dtype)
        # Queries and keys of a layer are normalised together, each head by its own weight.
        qk_norm = torch.cat(
            (
                self.q_norm[:, None].expand(-1, num_heads, -1),
                self.k_norm[:, None].expand(-1, config.num_kv_heads, -1),
            ),
            dim=1,
        )
        for i, layer in enumerate(self.layers):
            bias = None if self.qkv_bias is None else self.qkv_bias[i]
            heads = F.linear(layer.input_layernorm(hidden), self.qkv_weight[i], bias)
            heads = heads.view(len(hidden), -1, config.head_dim)
            turned, values = heads[:, : -config.num_kv_heads], heads[:, -config.num_kv_heads :]
            turned = rotate(rms_norm(turned, qk_norm[i], config.rms_norm_eps), rotary)
            hidden = hidden + layer.o_proj(attend(i, turned[:, :num_heads], turned[:, num_heads:], values))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden)

    @torch.no_grad()
    def forward(self, block_embeddings: torch.Tensor, caches: Sequence[ModelCache]) -> torch.Tensor:
        """Draft one block per sequence; nothing of it stays in the caches.

        Args:
            block_embeddings: [B, K, C], see `embed_block`; K may be less than the block size.
            caches: the B sequences' contexts, of any lengths; row k sits at position context length + k.

        Returns:
            [B, K, C] after the final norm, for `logits`.
        """
        num_slots, device = block_embeddings.shape[1], block_embeddings.device
        starts = [cache.context_length for cache in caches]
        positions = torch.cat([torch.arange(start, start + num_slots, device=device) for start in starts])
        hidden = self.run_layers(
            block_embeddings.flatten(0, 1), positions, CachedBlockAttention(self.config, caches, num_slots)
        )
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        for cache in caches:
            cache.commit(nothing)
        return hidden.view(block_embeddings.shape)

    def embed_block(
        self, root_tokens: torch.Tensor, target_model: Any, num_slots: int | None = None
    ) -> torch.Tensor:
        """Embeddings [B, K, C] of each root [B] int64 and K - 1 masks; K is `num_slots` or the block size."""
        num_slots = self.config.block_size if num_slots is None else num_slots
        token_ids = root_tokens.new_full((len(root_tokens), num_slots), self.config.mask_token_id)
        token_ids[:, 0] = root_tokens
        embeddings = target_model.embed(token_ids)
        scale = self.config.input_embedding_scale
        return embeddings if scale == 1.0 else embeddings * scale

    def logits(self, hidden: torch.Tensor, target_model: Any) -> torch.Tensor:
        """Logits [.., V] of block rows [.., C]; slot k's are for the token at slot k.

        A draft vocabulary leaves every other token at -inf.
        """
        logits = target_model.logits(hidden) if self.lm_head is None else self.lm_head(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        if self.draft_token_ids is None:
            return logits
        if self.lm_head is None:
            logits = logits.index_select(-1, self.draft_token_ids)
        whole = logits.new_full((*logits.shape[:-1], target_model.config.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.draft_token_ids, logits)


def load_drafter(
    path: str | Path,
    target_config: Any,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DFlash:
    """Load the drafter in `path` for a target: a folder with config.json and safetensors, a folder with config.json
    and one .gguf file, or a .gguf file that embeds its config.

    Args:
        target_config: the target's `ModelConfig`.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: the drafter does not fit the target, or a tensor is missing, left over or of the wrong shape.
    """
    files = open_drafter(Path(path))
    files.config.check_against(target_config)
    model = DFlash(files.config, device, dtype, own_head="lm_head.weight" in files.tensors.shapes)
    fill(model.checkpoint_tensors(), files.tensors)
    if files.draft_token_ids is not None:
        highest = int(files.draft_token_ids.max())
        if highest >= target_config.vocab_size:
            raise ValueError(
                f"drafter's d2t maps to token {highest}, target has {target_config.vocab_size} tokens"
            )
        model.draft_token_ids.copy_(files.draft_token_ids)
    return model.eval()
