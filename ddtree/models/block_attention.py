"""Attention of a DFlash block: over the sequence's committed context and the block itself (arXiv 2602.06036).

Letters: K block slots, H query heads, Hkv key/value heads, D head dim, S keys in reach.
Depending on the layer the block is bidirectional or causal, and the reach is everything or a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ddtree.caches.model_cache import ModelCache
from ddtree.models.drafter_config import DrafterConfig


class CachedBlockAttention:
    """Attention of block rows over each sequence's context and the block itself, staged and never committed."""

    def __init__(self, config: DrafterConfig, caches: Sequence[ModelCache], num_slots: int) -> None:
        self.config, self.caches, self.num_slots = config, caches, num_slots
        self.scale = config.head_dim**-0.5
        self.masks: dict[tuple[int, bool, int | None], torch.Tensor | None] = {}

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        causal, window = self.config.attends_causally(layer), self.config.window(layer)
        attended = []
        for index, cache in enumerate(self.caches):
            rows = slice(index * self.num_slots, (index + 1) * self.num_slots)
            context_length = cache.context_length
            keys_seen, values_seen = cache.layers[layer].stage(keys[rows], values[rows])
            # No row of the block sees behind this one, so a long context costs a sliding layer nothing.
            first = 0 if window is None else max(0, context_length - window + 1)
            mask = self._mask(context_length - first, causal, window, query.device)
            attended.append(self._attend(query[rows], keys_seen[:, first:], values_seen[:, first:], mask))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`query` [K, H, D] over `keys`, `values` [Hkv, S, D] -> [K, H * D]."""
        num_slots, _, head_dim = query.shape
        # The query heads of one key head become its rows: no copy of the keys, and any SDPA kernel will do.
        grouped = query.view(num_slots, len(keys), -1, head_dim).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(
            grouped.flatten(1, 2)[None], keys[None], values[None], attn_mask=mask, scale=self.scale
        )
        return attended.view(grouped.shape).permute(2, 0, 1, 3).reshape(num_slots, -1)

    def _mask(
        self, num_context: int, causal: bool, window: int | None, device: torch.device
    ) -> torch.Tensor | None:
        """[group * K, num_context + K] bool: which keys a block row sees; None if all of them."""
        key = (num_context, causal, window)
        if key not in self.masks:
            self.masks[key] = None
            num_keys = num_context + self.num_slots
            if (causal and self.num_slots > 1) or (window is not None and num_keys > window):
                slots = torch.arange(num_context, num_keys, device=device)
                distance = slots[:, None] - torch.arange(num_keys, device=device)
                visible = visible_distances(distance, causal, window)
                self.masks[key] = visible.repeat(self.config.num_heads // self.config.num_kv_heads, 1)
        return self.masks[key]


def visible_distances(distance: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor:
    """Bool like `distance` (query position minus key position): whether a layer's row may look that far."""
    if causal:
        return (distance >= 0) & (distance < window) if window is not None else distance >= 0
    return distance.abs() < window if window is not None else torch.ones_like(distance, dtype=torch.bool)
