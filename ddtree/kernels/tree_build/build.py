"""Draft trees of every sequence of a round, built where the drafter's candidates lie: no host, no synchronisation.

Letters: B sequences, S pool slots, D depths below the root, M candidates per depth, R packed rows.
"""

from __future__ import annotations

import torch

from ddtree.kernels.conditioning.weights import PathScores
from ddtree.kernels.tree_build.buffers import MAX_CANDIDATES, MAX_DEPTHS, TreeBuffers
from ddtree.kernels.tree_build.reference import build_ddtree_pooled_reference


def build_ddtree_pooled(
    root_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor | PathScores,
    budgets: torch.Tensor,
    num_depths: torch.Tensor,
    max_budget: int,
    slots: torch.Tensor,
    context_lengths: torch.Tensor,
    trees: TreeBuffers,
) -> TreeBuffers:
    """The best-first tree of every sequence, as `ddtree.tree.build.build_ddtree` makes it, ties included.

    Scores add up exactly, in units of 2^-40 nats; a log-probability below -131,072 counts as that, one of -inf or NaN
    excludes its token. A CUDA tensor goes to the Triton kernels (two launches), any other to the twin.

    Args:
        root_tokens: [B] int64.
        token_ids: [B, D, M] int64.
        log_probs: float32, <= 0. Factorised [B, D, M], each row best first; or conditioned [B, D, M, M], M <= 64: entry
            [b, k, p, c] of candidate c at depth k + 1 below candidate p at depth k, the root's children in row p = 0; or
            a `PathScores`, which looks at the grandparent too. Rows are in no order; the rank of a child is c.
        budgets: [B] int32, most drafted nodes; clamped to `max_budget` and to the sequence's rows. 0 is the root alone,
            below 0 is a sequence that has no rows.
        num_depths: [B] int32, how many of the D depths count.
        max_budget: `trees.max_budget` or less.
        slots: [B] int32, the pool slots; context_lengths: [S] int32.
        trees: what is written; `trees.starts` is read.

    Returns `trees`. Raises ValueError for shapes and dtypes that do not fit.
    """
    num_sequences, depths, width = token_ids.shape
    _expect("token_ids", token_ids, (num_sequences, depths, width), torch.int64)
    grandparents = isinstance(log_probs, PathScores)
    conditioned = grandparents or log_probs.ndim == 4
    for name, tensor in zip(log_probs._fields, log_probs, strict=True) if grandparents else [("log_probs", log_probs)]:
        _expect(name, tensor, (*token_ids.shape, width)[: 3 + conditioned], torch.float32)
    _expect("root_tokens", root_tokens, (num_sequences,), torch.int64)
    for name, tensor in (("budgets", budgets), ("num_depths", num_depths), ("slots", slots)):
        _expect(name, tensor, (num_sequences,), torch.int32)
    if context_lengths.dtype != torch.int32:
        raise ValueError(f"context_lengths must be int32, got {context_lengths.dtype}")
    if num_sequences != trees.num_sequences:
        raise ValueError(f"trees hold {trees.num_sequences} sequences, token_ids have {num_sequences}")
    if not 0 <= max_budget <= trees.max_budget:
        raise ValueError(f"max_budget must be 0 to the buffers' {trees.max_budget}, got {max_budget}")
    if depths > trees.max_depths:
        limit = f"; build TreeBuffers with max_depths={depths}" if depths <= MAX_DEPTHS else ""
        raise ValueError(f"token_ids have {depths} depths, the buffers {trees.max_depths}{limit}")
    if conditioned:
        _expect_candidates(width, trees)
    if token_ids.is_cuda and conditioned:
        from ddtree.kernels.tree_build.triton_conditioned import build_conditioned_pooled_triton as build
    elif token_ids.is_cuda:
        from ddtree.kernels.tree_build.triton import build_ddtree_pooled_triton as build
    else:
        build = build_ddtree_pooled_reference
    log_probs = PathScores(*(table.contiguous() for table in log_probs)) if grandparents else log_probs.contiguous()
    before, between, after = (root_tokens, token_ids), (budgets, num_depths), (slots, context_lengths)
    before, between, after = ([t.contiguous() for t in tensors] for tensors in (before, between, after))
    build(*before, log_probs, *between, max_budget, *after, trees)
    return trees


def _expect_candidates(width: int, trees: TreeBuffers) -> None:
    """Conditioned scores fit the buffers; on CUDA these were allocated for them."""
    if not 1 <= width <= MAX_CANDIDATES:
        raise ValueError(f"conditioned log_probs must have 1 to {MAX_CANDIDATES} candidates per depth, got {width}")
    if trees.device.type == "cuda" and width > trees.num_candidates:
        remedy = f"build TreeBuffers with num_candidates={width}"
        raise ValueError(f"log_probs are conditioned on {width} candidates, the buffers hold {trees.num_candidates}; {remedy}")


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {list(shape)} {dtype}, got {list(tensor.shape)} {tensor.dtype}")
