"""A target's forward over pools: the same weights and the same mathematics as the modules' own `forward`, with fused
kernels, in-place residual sums and no look at a value on the device, so that a CUDA graph can hold it.
Batch-invariant, every row is computed as if the tokens of its path were all there are ([batching.md](../../docs/batching.md)).

Letters: R packed rows, C model width, H query heads, Hkv key/value heads, D head dim, F feature width (layers x C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from ddtree.caches.pooled_rows import PREFILL, STEP, TREE, PooledRows
from ddtree.caches.pools import AttentionPool, PageTable, RecurrentPool, RecurrentShape, TargetPool
from ddtree.kernels.causal_conv import (
    Gates,
    causal_conv_commit_pooled,
    causal_conv_prefill_pooled,
    causal_conv_step_pooled,
    causal_conv_tree_pooled,
)
from ddtree.kernels.fused import gate_heads, norm_and_gate, rms_norm
from ddtree.kernels.gated_delta import (
    TOKENS,
    Walks,
    gated_delta_prefill_pooled,
    gated_delta_step_pooled,
    gated_delta_tree_pooled,
    gated_delta_walk_pooled,
    leaf_walks,
)
from ddtree.kernels.lineage import lineage_pooled
from ddtree.kernels.linear import Norm, fused_linear
from ddtree.kernels.qk_rotary import qk_rotary_pooled
from ddtree.kernels.tree_attention import tree_attention_pooled
from ddtree.kernels.tree_attention.invariant import LEAST_REACH, tree_attention_invariant
from ddtree.models.gated_attention import GatedAttention
from ddtree.models.gated_delta_net import GatedDeltaNet
from ddtree.models.layers import MLP, Attention, Linear, ZeroCentredRMSNorm
from ddtree.models.moe import MoE
from ddtree.models.pooled_moe import moe_invariant, moe_pooled


class PooledTarget:
    """Runs a target's layers over a `TargetPool`. Made once per engine; the model's weights stay where they are."""

    def __init__(
        self,
        model,
        feature_layers: Sequence[int],
        table: PageTable,
        num_pages: int,
        max_rows: int,
        *,
        batch_invariant: bool = False,
        block_size: int = 1,
    ) -> None:
        """`block_size`: the drafter's, one more than the deepest node of its trees."""
        why_not = unsupported(model)
        if why_not:
            raise ValueError(why_not)
        self.batch_invariant, self.reach = batch_invariant, lineage_reach(block_size)
        self.model, self.config = model, model.config
        self.feature_layers = tuple(feature_layers)
        self.pool = new_pool(model, table, num_pages, max_rows, batch_invariant)
        self.mixers = [mixer_of(layer) for layer in model.layers]

    @property
    def feature_width(self) -> int:
        return len(self.feature_layers) * self.config.hidden_size

    def __call__(self, rows: PooledRows, features: torch.Tensor | None = None) -> torch.Tensor:
        """Stage `rows` (or commit them: `STEP`, `PREFILL`) -> [R, C] after the final norm.

        `features` [>= R, F] takes the outputs of the feature layers; layer L means `hidden_states[L + 1]`.
        """
        if self.batch_invariant:
            lineage = lineage_pooled(rows.row_slots, rows.row_indices, rows.parents, self.reach)
            rows = replace(rows, lineage=lineage, walks=walks_of(rows, lineage) if self.pool.recurrent else None)
        hidden = F.embedding(rows.token_ids, self.model.embed_tokens)
        last = len(self.mixers) - 1
        for index, layer in enumerate(self.model.layers):
            self._mix(self.mixers[index], norm_of(layer.input_layernorm), hidden, rows, index)
            feed_forward(layer.mlp, norm_of(layer.post_attention_layernorm), hidden, self.batch_invariant)
            if index != last:
                self._tap(features, index, hidden)
        hidden = rms_norm(hidden, *norm_of(self.model.norm))
        self._tap(features, last, hidden)  # as transformers: the last one after the final norm
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., C] -> [.., V]."""
        if self.batch_invariant:
            head = self.model.lm_head
            return fused_linear(hidden, head.weight, bias=head.bias, batch_invariant=True)
        return self.model.logits(hidden)

    def _tap(self, features: torch.Tensor | None, layer: int, hidden: torch.Tensor) -> None:
        if features is not None and layer in self.feature_layers:
            start = self.feature_layers.index(layer) * hidden.shape[1]
            features[: hidden.shape[0], start : start + hidden.shape[1]].copy_(hidden)

    def _mix(self, mixer: nn.Module, norm: Norm, hidden: torch.Tensor, rows: PooledRows, layer: int) -> None:
        place = self.pool.places[layer]
        if isinstance(mixer, GatedDeltaNet):
            add_linear(mixer.out_proj, self._recall(mixer, norm, hidden, rows, place), hidden, self.batch_invariant)
        else:
            add_linear(mixer.o_proj, self._attend(mixer, norm, hidden, rows, place), hidden, self.batch_invariant)

    def _attend(self, mixer: nn.Module, norm: Norm, hidden: torch.Tensor, rows: PooledRows, place: int) -> torch.Tensor:
        """[R, C] -> [R, H * D], gated where the family gates."""
        pool, table = self.pool.attention, self.pool.table
        num_heads, head_dim = mixer.num_heads, mixer.head_dim
        heads = linear(mixer.qkv_proj, hidden, norm, batch_invariant=self.batch_invariant)
        heads = heads.view(hidden.shape[0], -1, head_dim)
        query = torch.empty(heads.shape[0], num_heads, head_dim, dtype=heads.dtype, device=heads.device)
        scale, kind, eps = qk_norm(mixer)
        keys, values = pool.key_pages[place], pool.value_pages[place]
        qk_rotary_pooled(
            heads,
            rows.positions,
            self.model.rotary.frequencies,
            self.model.rotary.sign,
            self.model.rotary.attention_factor,
            scale,
            kind,
            eps,
            keys,
            values,
            table.pages,
            rows.row_slots,
            rows.row_indices,
            table.context_lengths,
            query,
        )
        given = (query, keys, values, table.pages, rows.slots, rows.starts, table.context_lengths)
        if self.batch_invariant:
            path = (rows.positions, rows.row_slots, rows.lineage)
            attended = tree_attention_invariant(*given, *path, mixer.scale, rows.max_rows)
        else:
            attended = tree_attention_pooled(*given, rows.ancestor_mask, mixer.scale, rows.max_rows)
        if isinstance(mixer, GatedAttention):
            attended = gate_heads(attended, heads[:, num_heads + 2 * mixer.num_kv_heads :])
        return attended.view(heads.shape[0], -1)

    def _recall(self, mixer: GatedDeltaNet, norm: Norm, hidden: torch.Tensor, rows: PooledRows, place: int) -> torch.Tensor:
        """[R, C] -> [R, Hv * V]."""
        pool, shape, num_rows = self.pool.recurrent, mixer.shape, hidden.shape[0]
        staged = None if rows.mode == PREFILL else pool.inputs[place, :num_rows]
        projected = linear(mixer.in_proj, hidden, norm, out=staged, batch_invariant=self.batch_invariant)
        mixed, z, b, a = projected.split(mixer.sizes, dim=-1)
        if self.batch_invariant:
            out = self._walk(mixer, mixed, a, b, rows, place)
            return norm_and_gate(out, z.unflatten(-1, out.shape[1:]), mixer.norm, mixer.eps).view(num_rows, -1)
        gates = Gates.of(a, b, mixer.decay_rate, mixer.dt_bias)
        log_decay, beta = gates.log_decay, gates.beta
        state, conv_state = pool.states[place], pool.conv_states[place]
        out = torch.empty(num_rows, shape.num_value_heads, shape.value_dim, dtype=hidden.dtype, device=hidden.device)
        convolved = torch.empty(num_rows, shape.conv_channels, dtype=hidden.dtype, device=hidden.device)
        weight = mixer.conv_weight
        if rows.mode == PREFILL:
            causal_conv_prefill_pooled(mixed, weight, None, conv_state, rows.slots, rows.starts, rows.max_rows, convolved, gates)
            gated_delta_prefill_pooled(convolved, log_decay, beta, state, rows.slots, rows.starts, shape, out)
        elif rows.mode == STEP:
            causal_conv_step_pooled(mixed, weight, None, conv_state, rows.slots, rows.starts, convolved, gates)
            gated_delta_step_pooled(convolved, log_decay, beta, state, rows.slots, rows.starts, shape, out)
        else:
            row_places = (rows.slots, rows.starts, rows.row_slots, rows.row_indices, rows.parents)
            causal_conv_tree_pooled(mixed, weight, None, conv_state, *row_places, convolved, gates)
            staged = (pool.keys[place], pool.solved[place], pool.log_decays[place])
            gated_delta_tree_pooled(
                convolved, log_decay, beta, rows.ancestor_mask, state, rows.slots, rows.starts, rows.max_rows, shape, out,
                *staged, rows.row_slots,
            )  # fmt: skip
        return norm_and_gate(out, z.unflatten(-1, out.shape[1:]), mixer.norm, mixer.eps).view(num_rows, -1)

    def _walk(
        self, mixer: GatedDeltaNet, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rows: PooledRows, place: int
    ) -> torch.Tensor:
        """The recurrence step by step: `mixed` [R, conv channels], the gates' `a`, `b` [R, Hv] -> [R, Hv, V]."""
        pool, shape, num_rows = self.pool.recurrent, mixer.shape, len(mixed)
        if rows.mode == TREE:
            convolved, log_decay, beta = (each[place, :num_rows] for each in (pool.convolved, pool.log_decay, pool.beta))
        else:
            convolved, (log_decay, beta) = torch.empty_like(mixed), a.new_empty(2, *a.shape, dtype=torch.float32)
        gates = Gates(a, b, mixer.decay_rate, mixer.dt_bias, log_decay, beta)
        states, conv_states = pool.states[place : place + 1], pool.conv_states[place : place + 1]
        row_places = (rows.slots, rows.starts, rows.row_slots, rows.row_indices, rows.parents)
        causal_conv_tree_pooled(mixed, mixer.conv_weight, None, conv_states[0], *row_places, convolved, gates)
        out = torch.empty(num_rows, shape.num_value_heads, shape.value_dim, dtype=mixed.dtype, device=mixed.device)
        gated_delta_walk_pooled(convolved[None], log_decay[None], beta[None], states, rows.walks, shape, out)
        if rows.mode != TREE:
            causal_conv_commit_pooled(mixed[None], conv_states, rows.slots, rows.starts, rows.walks.paths, rows.walks.lengths)
        return out


def walks_of(rows: PooledRows, lineage: torch.Tensor) -> Walks:
    """Down to each leaf, or consecutive tokens one after another."""
    if rows.mode == TREE:
        return leaf_walks(lineage, rows.row_slots, rows.row_indices)
    paths = torch.arange(rows.max_rows, dtype=torch.int32, device=lineage.device).repeat(rows.num_sequences, 1)
    return Walks(TOKENS, rows.slots, rows.starts[:-1], paths, rows.starts.diff())


def norm_of(module: nn.Module) -> Norm:
    """A norm as the kernels take it, of either kind."""
    if isinstance(module, ZeroCentredRMSNorm):
        return Norm(module.scale, module.eps, "zero_centred")
    return Norm(module.weight, module.eps, "plain")


def qk_norm(mixer: nn.Module) -> tuple[torch.Tensor | None, str | None, float]:
    """The norm of an attention's query and key heads: scale [H + Hkv, D], kind, eps."""
    if isinstance(mixer, GatedAttention):
        return mixer.qk_scale, "zero_centred", mixer.eps
    if mixer.qk_norm_eps is not None:
        return mixer.qk_norm, "plain", mixer.qk_norm_eps
    return None, None, 0.0


def linear(
    module: Linear, hidden: torch.Tensor, norm: Norm, out: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """module(norm(hidden)), in `out` if given."""
    return fused_linear(hidden, module.weight, bias=module.bias, norm=norm, out=out, batch_invariant=batch_invariant)


def add_linear(module: Linear, rows: torch.Tensor, hidden: torch.Tensor, batch_invariant: bool = False) -> None:
    """hidden += module(rows), the sum inside the product's epilogue."""
    fused_linear(rows, module.weight, bias=module.bias, residual=hidden, out=hidden, batch_invariant=batch_invariant)


def feed_forward(mlp: nn.Module, norm: Norm, hidden: torch.Tensor, batch_invariant: bool = False) -> None:
    """hidden += mlp(norm(hidden))."""
    if isinstance(mlp, MoE):
        run = moe_invariant if batch_invariant else moe_pooled
        hidden.add_(run(mlp, rms_norm(hidden, *norm)))
        return
    gate_up = mlp.gate_up_proj
    inner = fused_linear(
        hidden, gate_up.weight, bias=gate_up.bias, norm=norm, swiglu=True, batch_invariant=batch_invariant
    )
    add_linear(mlp.down_proj, inner, hidden, batch_invariant)


def mixer_of(layer: nn.Module) -> nn.Module:
    """A layer's attention, of either family's layout."""
    return layer.mixer if hasattr(layer, "mixer") else layer.self_attn


def unsupported(model) -> str | None:
    """Why a target cannot run over pools; None if it can."""
    for layer in model.layers:
        mixer = mixer_of(layer)
        if not isinstance(mixer, (Attention, GatedAttention, GatedDeltaNet)):
            return f"{type(mixer).__name__} has no pooled form"
        if not isinstance(layer.mlp, (MLP, MoE)):
            return f"{type(layer.mlp).__name__} has no pooled form"
    return None


def lineage_reach(block_size: int) -> int:
    """Places of a lineage that holds the deepest path of a drafter's trees."""
    return max(LEAST_REACH, 1 << (block_size - 1).bit_length())


def new_pool(model, table: PageTable, num_pages: int, max_rows: int, batch_invariant: bool = False) -> TargetPool:
    """Empty pools for a target: pages for its attention layers, states for its linear ones."""
    config, places, counts = model.config, [], {"attention": 0, "recurrent": 0}
    for layer in model.layers:
        kind = "recurrent" if isinstance(mixer_of(layer), GatedDeltaNet) else "attention"
        places.append(counts[kind])
        counts[kind] += 1
    attention = recurrent = None
    placed = (model.dtype, model.device)
    if counts["attention"]:
        attention = AttentionPool(counts["attention"], num_pages, config.num_kv_heads, config.head_dim, *placed)
    if counts["recurrent"]:
        linear = config.linear_attention
        width = linear.conv_channels + linear.values_size + 2 * linear.num_value_heads
        shape = RecurrentShape(
            linear.num_key_heads,
            linear.num_value_heads,
            linear.key_dim,
            linear.value_dim,
            linear.conv_width,
            linear.conv_channels,
            width,
        )
        recurrent = RecurrentPool(counts["recurrent"], table.num_slots, max_rows, shape, *placed, batch_invariant)
    return TargetPool(table, attention, recurrent, tuple(places))
