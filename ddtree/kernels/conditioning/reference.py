"""The obvious twin: gathers and batched products of whole tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ddtree.kernels.conditioning.weights import LEAST_LOG_PROB, LEAST_REST, AdapterWeights


def transitions_pooled_reference(
    places: torch.Tensor,
    root_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    ranking: torch.Tensor,
    strengths: torch.Tensor,
    weights: AdapterWeights,
) -> torch.Tensor:
    """Same arguments and result as `transitions_pooled`."""
    roots = root_tokens[:, None, None].expand(-1, 1, token_ids.shape[2])
    parents = torch.cat([roots, token_ids[:, :-1]], dim=1)
    hidden = F.silu(F.embedding(parents, weights.parent_table) + places[:, :, None])
    hidden = hidden + F.silu(F.linear(hidden, weights.mix_weight, weights.mix_bias))
    out = F.linear(hidden, weights.out_weight, weights.out_bias)
    matches = out[..., :-2] @ F.embedding(token_ids, weights.candidate_table).transpose(-1, -2)
    own = log_probs.clamp(min=LEAST_LOG_PROB)[:, :, None]
    corrections = torch.cat([matches.float() + out[..., -2:-1].float() * own, out[..., -1:].float()], dim=-1)
    rest = torch.log1p(-ranking.exp().sum(dim=-1, keepdim=True).clamp(max=1 - LEAST_REST))
    scores = torch.cat([ranking, rest], dim=-1)[:, :, None] + strengths[:, None, None, None] * corrections
    return scores.log_softmax(dim=-1)[..., :-1].contiguous()
