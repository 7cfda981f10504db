"""The acceptance walk of every sequence of a round, on the device.

Letters: B sequences, R packed rows, P most path rows.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ddtree.kernels.tree_accept.reference import accept_pooled_reference

__all__ = ["PackedTrees", "accept_pooled", "accept_pooled_reference"]


class PackedTrees(Protocol):
    """The rows of B trees, such as `TreeBuffers`: sequence b's nodes are the `counts[b]` rows from starts[b] on."""

    token_ids: torch.Tensor  # [R] int64
    parents: torch.Tensor  # [R] int32; local index, -1 at the root
    starts: torch.Tensor  # [B + 1] int32
    counts: torch.Tensor  # [B] int32
    rows_each: int  # most rows of one sequence


def accept_pooled(
    trees: PackedTrees, target_tokens: torch.Tensor, path_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk from each root along the children that carry the target's tokens, as `ddtree.tree.accept.accept` does.

    `target_tokens` [R] int64, the target's choice after each node. `path_rows` is P: no fewer than the deepest node's
    depth + 1, or the walk ends there. A CUDA tensor goes to the Triton kernel (one launch), any other to the twin.

    Returns path [B, P] int32 (local indices, root first), path_lengths [B] int32, emitted [B, P] int64 (accepted
    tokens, then the bonus token; as many as the path has nodes) and the bonus tokens [B] int64: the next roots. Behind
    its length a row is 0, as is everything of a sequence without nodes. Raises ValueError unless path_rows >= 1 and
    the target's tokens are as many as the rows.
    """
    if path_rows < 1:
        raise ValueError(f"path_rows must be >= 1 (deepest depth + 1), got {path_rows}")
    if target_tokens.shape != trees.token_ids.shape or target_tokens.dtype != torch.int64:
        raise ValueError(
            f"target_tokens must be {list(trees.token_ids.shape)} int64, one per row, "
            f"got {list(target_tokens.shape)} {target_tokens.dtype}"
        )
    arrays = (trees.token_ids, trees.parents, trees.starts, trees.counts, target_tokens, path_rows)
    if target_tokens.is_cuda:
        from ddtree.kernels.tree_accept.triton import accept_pooled_triton

        return accept_pooled_triton(*arrays, max_rows=trees.rows_each)
    return accept_pooled_reference(*arrays)
