"""Anchors, blocks and their attention mask.

An anchor is a position a: its token is the block's slot 0 (the root), slots 1 .. K-1 are masks that predict tokens
a+1 .. a+K-1. The root is not in the target's cache yet, so the block's context is the features of tokens 0 .. a-1.
All blocks of a sequence share one attention: keys are the T context tokens followed by the R block rows.
Letters: S sequences, T tokens, A anchors, K block size, R block rows (A K, then padding rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree.training.sample import GENERATED, USER_TOKEN


@dataclass(frozen=True, eq=False)
class Blocks:
    """Every block row of a batch. Row r of a sequence is slot `r % K` of block `r // K`."""

    token_ids: torch.Tensor  # [S, R] int64: the root in slot 0, the mask token elsewhere
    positions: torch.Tensor  # [S, R] int64: anchor + slot
    labels: torch.Tensor  # [S, R] int64: the token at that position
    weights: torch.Tensor  # [S, R] float32; 0 where nothing is to be learnt
    limits: torch.Tensor  # [S, R] int64: the row sees context tokens 0 .. limit - 1
    block_of_row: torch.Tensor  # [R] int64; padding rows are blocks of their own behind the last


def gamma(block_size: int) -> float:
    """Decay of the slot weights: 4 at block size 8, 5 at 10, 7 at 16 (arXiv 2602.06036)."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def slot_weights(block_size: int, device: torch.device) -> torch.Tensor:
    """`[K]` float32: 0 for slot 0, then exp(-(k - 1) / gamma)."""
    slots = torch.arange(block_size, dtype=torch.float32, device=device)
    return torch.where(slots > 0, torch.exp(-(slots - 1) / gamma(block_size)), 0.0)


def choose_anchors(
    classes: torch.Tensor, num_anchors: int, user_weight: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """`[S, A]` ascending anchors, drawn without replacement; a is possible where token a+1 was generated.

    `classes [S, T]` are the sampler's; user tokens are drawn with relative weight `user_weight`. Sequences with too
    few possible anchors return others, whose labels weigh nothing.
    """
    following = torch.cat([classes[:, 1:], torch.zeros_like(classes[:, :1])], dim=1)
    weight = (following == GENERATED).float() + user_weight * (following == USER_TOKEN)
    weight[:, 0] = 0.0
    uniform = torch.rand(classes.shape, device=classes.device, generator=generator).clamp_min(1e-20)
    keys = torch.where(weight > 0, uniform.log() / weight.clamp_min(1e-6), -torch.inf)
    return keys.topk(num_anchors, dim=1).indices.sort(dim=1).values


def build_blocks(
    tokens: torch.Tensor,
    classes: torch.Tensor,
    anchors: torch.Tensor,
    block_size: int,
    num_rows: int,
    mask_token_id: int,
    user_weight: float,
) -> Blocks:
    """Blocks of `block_size` at `anchors [S, A]` of `tokens [S, T]`, padded to `num_rows` rows a sequence."""
    sequences, length = tokens.shape
    num_anchors, device = anchors.shape[1], tokens.device
    padding = num_rows - num_anchors * block_size
    assert padding >= 0, f"{num_anchors} blocks of {block_size} do not fit {num_rows} rows"
    slots = torch.arange(block_size, device=device)
    positions = anchors[:, :, None] + slots  # [S, A, K]
    inside = positions < length
    flat = positions.clamp_max(length - 1).view(sequences, -1)
    labels = tokens.gather(1, flat).view_as(positions)
    label_classes = classes.gather(1, flat).view_as(positions)
    weights = (label_classes == GENERATED).float() + user_weight * (label_classes == USER_TOKEN)
    weights = weights * inside * slot_weights(block_size, device)
    token_ids = torch.where(slots == 0, labels, mask_token_id)
    limits = anchors[:, :, None].expand_as(positions)
    block_of_row = torch.arange(num_rows, device=device) // block_size
    block_of_row[num_anchors * block_size :] = num_anchors + torch.arange(padding, device=device)

    def pad(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values.reshape(sequences, -1), (0, padding))

    return Blocks(pad(token_ids), pad(positions), pad(labels), pad(weights), pad(limits), block_of_row)


def dense_mask(blocks: Blocks, length: int) -> torch.Tensor:
    """`[S, 1, R, T + R]` bool: the context before the row's anchor, and the row's own block."""
    context = torch.arange(length, device=blocks.limits.device) < blocks.limits[:, :, None]
    own = blocks.block_of_row[:, None] == blocks.block_of_row
    return torch.cat([context, own.expand(len(context), -1, -1)], dim=2)[:, None]


def block_sparse_mask(blocks: Blocks, length: int):
    """The same mask as a flex-attention `BlockMask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    limits, block_of_row = blocks.limits, blocks.block_of_row

    def visible(sequence, head, query, key):
        own = block_of_row[(key - length).clamp_min(0)] == block_of_row[query]
        return (key < limits[sequence, query]) | ((key >= length) & own)

    sequences, rows = limits.shape
    return create_block_mask(visible, sequences, None, rows, length + rows, device=limits.device)
