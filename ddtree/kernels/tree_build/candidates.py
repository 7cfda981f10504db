"""The drafter's best tokens of every depth, from its logits, without synchronisation.

Letters: R rows (B sequences x D depths), V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch

from ddtree.kernels.sample import rank_scores_pooled
from ddtree.kernels.tree_build.buffers import MAX_BUDGET
from ddtree.kernels.tree_build.reference import normalised, top_candidates_reference


def top_candidates_pooled(
    logits: torch.Tensor,
    num: int,
    *,
    temperatures: torch.Tensor | None = None,
    streams: torch.Tensor | None = None,
    method: Literal["triton", "topk"] = "triton",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `num` tokens of each row: ids [R, num] int64 and log-probabilities [R, num] float32, best first.

    `logits` [R, V] bf16, fp16 or fp32; the log-softmax is taken over all of V, in fp32. Equal log-probabilities go to
    the lowest id, also at the cut. With `temperatures` [R] float32 and `streams` [R] int64, rows of temperature > 0 are
    ranked with the request's own noise (`rank_scores_pooled`). NaN counts as -inf; a place that only a token of -inf
    is left for gets id 0 and -inf.

    A CUDA tensor goes to the Triton kernels, or to torch.topk over unique keys where `method` says so; any other to
    the twin. Raises ValueError unless 1 <= num <= min(V, 1024).
    """
    if not 1 <= num <= min(logits.shape[-1], MAX_BUDGET):
        raise ValueError(f"num must be 1 to {min(logits.shape[-1], MAX_BUDGET)} (vocabulary, limit), got {num}")
    if streams is not None:
        logits = rank_scores_pooled(logits, temperatures, streams)
    if method == "topk":
        return top_candidates_topk(logits, num)
    if logits.is_cuda:
        from ddtree.kernels.top_tokens.triton import top_tokens_triton

        return top_tokens_triton(logits, num)[:2]
    return top_candidates_reference(logits, num)


def top_candidates_topk(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch.topk, whose order among equals is not defined: so over keys that are all different."""
    log_probs = normalised(logits)
    bits = (log_probs + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # rises with the float
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = order.long() * 2**32 + (2**31 - 1 - ids)
    best = keys.topk(num, dim=-1).values
    token_ids = 2**31 - 1 - (best & 0xFFFFFFFF)
    log_probs = log_probs.gather(1, token_ids)
    return token_ids.masked_fill_(log_probs == -torch.inf, 0), log_probs
