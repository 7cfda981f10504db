"""The path of a chain where scores depend on the parent: at each depth the best child of the last one (tree.conditioned).

What comes out has one candidate per depth, so `build_ddtree_pooled` makes a chain of it. Letters: B sequences, D depths
below the root, M candidates per depth.
"""

from __future__ import annotations

import torch

from ddtree.kernels.conditioning.weights import PathScores


def best_path_pooled(token_ids: torch.Tensor, scores: torch.Tensor | PathScores) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's path: ids [B, D, 1] int64 and log-probabilities [B, D, 1] float32, ties to the first candidate.

    `token_ids` [B, D, M] int64 and `scores` as `build_ddtree_pooled` takes them where they are conditioned: [B, D, M, M], or
    a `PathScores`. -inf and NaN exclude; where all of a row are excluded so is that depth, and a chain ends above it.

    A CUDA tensor goes to the Triton kernel (one launch), any other to the twin. Raises ValueError for other shapes.
    """
    expected = (*token_ids.shape, token_ids.shape[-1])
    for table in tables_of(scores):
        if tuple(table.shape) != expected or table.dtype != torch.float32:
            raise ValueError(f"scores must be {list(expected)} torch.float32, got {list(table.shape)} {table.dtype}")
    if token_ids.is_cuda:
        from ddtree.kernels.tree_build.triton_chain import best_path_pooled_triton

        return best_path_pooled_triton(token_ids, scores)
    return best_path_pooled_reference(token_ids, scores)


def tables_of(scores: torch.Tensor | PathScores) -> tuple[torch.Tensor, ...]:
    """Those below parents; of a `PathScores` those below grandparents and the norms too."""
    return tuple(scores) if isinstance(scores, PathScores) else (scores,)


def best_path_pooled_reference(token_ids: torch.Tensor, scores: torch.Tensor | PathScores) -> tuple[torch.Tensor, torch.Tensor]:
    """The obvious twin: a depth at a time."""
    below_parent, *below_two = tables_of(scores)
    places = torch.arange(len(token_ids), device=token_ids.device)
    grandparent = parents = torch.zeros_like(places)
    path, log_probs = [], []
    for depth in range(token_ids.shape[1]):
        rows = below_parent[places, depth, parents]
        if below_two:
            below_grandparent, norms = below_two
            rows = rows + below_grandparent[places, depth, grandparent] - norms[places, depth, grandparent, parents][:, None]
        rows = rows.clamp(max=0.0).masked_fill(rows.isnan(), -torch.inf)
        grandparent, parents = parents, rows.argmax(dim=-1)
        path.append(token_ids[places, depth, parents])
        log_probs.append(rows[places, parents])
    return torch.stack(path, dim=1)[..., None], torch.stack(log_probs, dim=1)[..., None]
