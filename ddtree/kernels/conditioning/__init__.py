"""What an adapter says of every candidate below every candidate of the depth before, for all sequences of a round.

Letters: A ancestors that count (the parent; the grandparent too), B sequences, D depths below the root, M candidates per depth, H adapter width, E rank of the tables, V vocabulary.
"""

from __future__ import annotations

import torch

from ddtree.kernels.conditioning.reference import transitions_pooled_reference
from ddtree.kernels.conditioning.weights import LEAST_LOG_PROB, LEAST_REST, AdapterWeights, PathScores

__all__ = ["LEAST_LOG_PROB", "LEAST_REST", "AdapterWeights", "PathScores", "transitions_pooled", "transitions_pooled_reference"]

WIDTH_STEP, MOST_CANDIDATES = 64, 64  # of the kernels; other shapes take the twin


def transitions_pooled(
    places: torch.Tensor,
    root_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    ranking: torch.Tensor,
    strengths: torch.Tensor,
    weights: AdapterWeights,
) -> torch.Tensor | PathScores:
    """Conditioned log-probabilities [B, D, M, M] float32, as `models.conditioning` has them; with two ancestors a `PathScores`.

    Entry [b, k, p, c] is of candidate c at depth k + 1 below candidate p at depth k, normalised with everything that is no
    candidate; at depth 1 (k = 0) every parent is the root. A CUDA tensor goes to the Triton kernels (two launches; three) where H is
    a multiple of 64 and M at most 64; any other to the twin, which a CUDA graph can hold as well.

    Args:
        places: [A, B, D, H], what the parents (then the grandparents) of a depth have in common, in the weights' dtype.
        root_tokens: [B] int64; token_ids: [B, D, M] int64, the candidates.
        log_probs: [B, D, M] float32, the drafter's own, at temperature 1 and without noise; counted as -40 at least.
        ranking: [B, D, M] float32, what the drafter ranks with, normalised over the vocabulary. Where it is -inf, so is
            the result.
        strengths: [B] float32, what a nat of correction is worth in the ranking.
        weights: the adapter's, bf16, fp16 or fp32.

    Raises ValueError for shapes and dtypes that do not fit.
    """
    num_sequences, depths, width = token_ids.shape
    num_ancestors, _, size = weights.parent_tables.shape
    _expect("places", places, (num_ancestors, num_sequences, depths, size), weights.parent_tables.dtype)
    _expect("root_tokens", root_tokens, (num_sequences,), torch.int64)
    _expect("token_ids", token_ids, token_ids.shape, torch.int64)
    for name, tensor in (("log_probs", log_probs), ("ranking", ranking)):
        _expect(name, tensor, (num_sequences, depths, width), torch.float32)
    _expect("strengths", strengths, (num_sequences,), torch.float32)
    weights.check()
    if token_ids.is_cuda and size % WIDTH_STEP == 0 and 1 <= width <= MOST_CANDIDATES and depths:
        from ddtree.kernels.conditioning.triton import transitions_pooled_triton as transitions
    else:
        transitions = transitions_pooled_reference
    rows = (places, root_tokens, token_ids, log_probs, ranking, strengths)
    return transitions(*(tensor.contiguous() for tensor in rows), weights)


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {list(shape)} {dtype}, got {list(tensor.shape)} {tensor.dtype}")
