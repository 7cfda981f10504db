"""A DFlash drafter over pools: absorb target features, draft a block, with nothing that a CUDA graph cannot hold.

Letters: B sequences, K block slots, R = B * K rows, P path rows, T = B * P, C model width, H query heads, Hkv key/value
heads, D head dim, F feature width. It shares the target's page table: the same tokens lie in the same places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ddtree.caches.pooled_rows import TREE, PooledRows, consecutive_rows
from ddtree.caches.pools import AttentionPool, PageTable
from ddtree.kernels.fused import rms_norm
from ddtree.kernels.qk_rotary import qk_rotary_pooled
from ddtree.kernels.tree_attention import tree_attention_pooled
from ddtree.models.pooled_target import add_linear, feed_forward, norm_of


class PooledDFlash:
    """Runs a drafter's layers over an `AttentionPool` beside its target, or over whatever `pool` has such pages."""

    def __init__(self, model, target_model, table: PageTable, num_pages: int, pool: AttentionPool | None = None) -> None:
        config = model.config
        self.model, self.target_model, self.table, self.config = model, target_model, table, config
        self.pool = pool or AttentionPool(
            config.num_layers, num_pages, config.num_kv_heads, config.head_dim, model.dtype, model.device
        )
        # Queries and keys of a layer are normalised together, each head by its own weight.
        self.qk_norm = torch.cat(
            (
                model.q_norm[:, None].expand(-1, config.num_heads, -1),
                model.k_norm[:, None].expand(-1, config.num_kv_heads, -1),
            ),
            dim=1,
        ).contiguous()

    def absorb(self, features: torch.Tensor, slots: torch.Tensor, path_lengths: torch.Tensor) -> None:
        """Key and value the target features [B, P, F] of newly committed tokens, of which each sequence has
        `path_lengths` [B]; after their number was added to the context lengths."""
        num_sequences, num_rows = features.shape[:2]
        index = torch.arange(num_rows, device=features.device, dtype=torch.int32)
        first = self.table.context_lengths[slots.long()] - path_lengths
        places = (first[:, None] + index).flatten()
        row_slots = torch.where(index < path_lengths[:, None], slots[:, None], -1).flatten()
        # Beyond a path's end the rows are stale, perhaps NaN: the null page takes them, and it must stay finite.
        flat = torch.where(row_slots[:, None] >= 0, features.reshape(num_sequences * num_rows, -1), 0)
        self.absorb_rows(flat, row_slots, places)

    def absorb_rows(self, features: torch.Tensor, row_slots: torch.Tensor, places: torch.Tensor) -> None:
        """Key and value target features [R, F], finite all of them, of the tokens at `places` [R] in `row_slots` [R]; -1 for
        rows that nobody owns."""
        keys, values = self.model.project_context(features, places)
        self.pool.write(keys, values, row_slots, places, self.table)

    def draft(self, roots: torch.Tensor, slots: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One block a sequence: `roots` [B] int64 -> states [B, K, C], logits [B, K - 1, V] of the slots after the root."""
        hidden = self.model.embed_block(roots, self.target_model, num_slots)
        token_ids = roots[:, None].expand(-1, num_slots)  # only its shape counts: the embedding is done
        rows = consecutive_rows(TREE, token_ids, slots, self.table.context_lengths)
        hidden = self._run_layers(hidden.flatten(0, 1), rows)
        states = hidden.view(len(roots), num_slots, -1)
        return states, self.model.logits(states[:, 1:].contiguous(), self.target_model)

    def _run_layers(self, hidden: torch.Tensor, rows: PooledRows) -> torch.Tensor:
        for index, layer in enumerate(self.model.layers):
            attended = self._attend(index, rms_norm(hidden, *norm_of(layer.input_layernorm)), rows)
            add_linear(layer.o_proj, attended, hidden)
            feed_forward(layer.mlp, norm_of(layer.post_attention_layernorm), hidden)
        return rms_norm(hidden, self.model.norm.weight, self.config.rms_norm_eps, "plain")

    def _attend(self, layer: int, normed: torch.Tensor, rows: PooledRows) -> torch.Tensor:
        """[R, C] -> [R, H * D]; the block's keys and values are staged and never committed."""
        model, config, table = self.model, self.config, self.table
        bias = None if model.qkv_bias is None else model.qkv_bias[layer]
        heads = F.linear(normed, model.qkv_weight[layer], bias).view(len(normed), -1, config.head_dim)
        query = torch.empty(len(normed), config.num_heads, config.head_dim, dtype=heads.dtype, device=heads.device)
        keys, values = self.pool.key_pages[layer], self.pool.value_pages[layer]
        qk_rotary_pooled(
            heads,
            rows.positions,
            model.rotary.frequencies,
            model.rotary.sign,
            model.rotary.attention_factor,
            self.qk_norm[layer],
            "plain",
            config.rms_norm_eps,
            keys,
            values,
            table.pages,
            rows.row_slots,
            rows.row_indices,
            table.context_lengths,
            query,
        )
        attended = tree_attention_pooled(
            query,
            keys,
            values,
            table.pages,
            rows.slots,
            rows.starts,
            table.context_lengths,
            None,
            config.head_dim**-0.5,
            rows.max_rows,
            window=config.window(layer),
            bidirectional=not config.attends_causally(layer),
        )
        return attended.view(len(normed), -1)
