"""The served drafter, run on many anchors of many sequences at once.

`DFlash.project_context` and `DFlash.run_layers` are the serving code itself; only the attention between them differs:
a mask over all blocks of a sequence instead of one cache per block.
Letters: S sequences, T context tokens, R block rows, H query heads, G key-value heads, D head dim, F feature width.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ddtree.models.dflash import DFlash
from ddtree.models.drafter_config import DrafterConfig
from ddtree.training.blocks import Blocks, block_sparse_mask, dense_mask
from ddtree.training.config import TrainingConfig
from ddtree.training.features import DenseTarget


def drafter_config(target: DenseTarget, config: TrainingConfig) -> dict:
    """The drafter's config.json in z-lab's flat form, for this target."""
    shape = target.config
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "shrinkable_block": True,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "num_target_layers": shape.num_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "vocab_size": shape.vocab_size,
    }


def new_drafter(target: DenseTarget, config: TrainingConfig) -> DFlash:
    """A drafter with fresh float32 weights that learn, the same for the same seed."""
    drafter = DFlash(DrafterConfig.from_hf(drafter_config(target, config)), target.device, torch.float32)
    initialise(drafter, target, config.seed)
    return drafter.requires_grad_(True)


@torch.no_grad()
def initialise(drafter: DFlash, target: DenseTarget, seed: int) -> None:
    """Fresh weights in place: normal(0.02), less where a layer writes to the residual stream; norms 1, but the final
    norm is the target's, since the head is too.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: torch.Tensor, std: float) -> None:
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif "o_proj" in name or "down_proj" in name:
            draw(parameter, 0.02 / (2 * len(drafter.layers)) ** 0.5)
        else:
            draw(parameter, 0.02)
    drafter.norm.weight.copy_(target.final_norm)


def run_packed(
    drafter: DFlash, features: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, mask, attention: str
) -> torch.Tensor:
    """Hidden states `[S, R, C]` of all block rows after the final norm.

    Args:
        features: `[S, T, F]` of the context.
        embeddings: `[S, R, C]` of the block rows, in the dtype of the residual stream.
        positions: `[S, R]` int64 of the block rows.
        mask: `blocks.dense_mask`, or `blocks.block_sparse_mask` when `attention` is "flex".
    """
    sequences, length, _ = features.shape
    config = drafter.config
    scale = config.head_dim**-0.5
    context = torch.arange(length, device=features.device).repeat(sequences)
    context_keys, context_values = drafter.project_context(features.flatten(0, 1), context)

    def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        def heads_first(rows: torch.Tensor) -> torch.Tensor:
            return rows.unflatten(0, (sequences, -1)).to(values.dtype).transpose(1, 2)

        query = heads_first(query)
        keys = torch.cat([heads_first(context_keys[layer]), heads_first(keys)], dim=2)
        values = torch.cat([heads_first(context_values[layer]), heads_first(values)], dim=2)
        if attention == "flex":
            attended = flex(query, keys, values, mask, scale)
        else:
            # with a mask and grouped heads only the slowest kernel would run: repeat the keys instead
            group = config.num_heads // config.num_kv_heads
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)

    hidden = drafter.run_layers(embeddings.flatten(0, 1), positions.flatten(), attend)
    return hidden.unflatten(0, (sequences, -1))


def flex(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask, scale: float) -> torch.Tensor:
    """`query [S, H, R, D]` over `keys`, `values [S, G, T + R, D]` under a `BlockMask`."""
    from torch.nn.attention.flex_attention import flex_attention

    grouped = query.shape[1] != keys.shape[1]
    return flex_attention(query, keys, values, block_mask=mask, scale=scale, enable_gqa=grouped)


class PackedDrafter:
    """A drafter with its training-time forward: attention kind, compilation and autocast settled once."""

    def __init__(self, drafter: DFlash, target: DenseTarget, attention: str = "sdpa", compiled: bool = False) -> None:
        self.drafter, self.target, self.attention = drafter, target, attention
        self.name = attention + (" compiled" if compiled else "")
        self.autocast = target.device.type == "cuda"
        self.run = functools.partial(torch.compile(run_packed, dynamic=False) if compiled else run_packed, drafter)

    def __call__(self, features: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Hidden states `[S, R, C]` of the blocks in the context `features [S, T, F]`."""
        length = features.shape[1]
        # masks are made outside the compiled part: they need no gradient and change each step
        mask = (block_sparse_mask if self.attention == "flex" else dense_mask)(blocks, length)
        embeddings = self.target.embed(blocks.token_ids).float()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            return self.run(features, embeddings, blocks.positions, mask, self.attention)
