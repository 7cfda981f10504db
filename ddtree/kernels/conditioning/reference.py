"""The obvious twin: gathers and batched products of whole tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ddtree.kernels.conditioning.weights import LEAST_LOG_PROB, LEAST_REST, AdapterWeights, PathScores


def transitions_pooled_reference(
    places: torch.Tensor,
    root_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    ranking: torch.Tensor,
    strengths: torch.Tensor,
    weights: AdapterWeights,
) -> torch.Tensor | PathScores:
    """Same arguments and result as `transitions_pooled`."""
    rest = torch.log1p(-ranking.exp().sum(dim=-1, keepdim=True).clamp(max=1 - LEAST_REST))
    scores = torch.cat([ranking, rest], dim=-1)[:, :, None]
    strengths = strengths[:, None, None, None]
    scores = scores + strengths * _corrections(0, places, root_tokens, token_ids, log_probs, weights)
    if len(places) == 1:
        return scores.log_softmax(dim=-1)[..., :-1].contiguous()
    grandparent = strengths * _corrections(1, places, root_tokens, token_ids, log_probs, weights)
    grandparent[:, 0] = 0.0  # depth 1 has no grandparents
    norms = (scores[:, :, None] + grandparent[:, :, :, None]).logsumexp(dim=-1)
    return PathScores(scores[..., :-1].contiguous(), grandparent[..., :-1].contiguous(), norms)


def _corrections(ancestor, places, root_tokens, token_ids, log_probs, weights: AdapterWeights) -> torch.Tensor:
    """[B, D, M, M + 1], in nats, of the candidates and everything else below each token `ancestor` + 1 depths above."""
    above = root_tokens[:, None, None].expand(-1, ancestor + 1, token_ids.shape[2])
    above = torch.cat([above, token_ids], dim=1)[:, : token_ids.shape[1]]
    hidden = F.silu(F.embedding(above, weights.parent_tables[ancestor]) + places[ancestor][:, :, None])
    hidden = hidden + F.silu(F.linear(hidden, weights.mix_weights[ancestor], weights.mix_biases[ancestor]))
    out = F.linear(hidden, weights.out_weights[ancestor], weights.out_biases[ancestor])
    matches = out[..., :-2] @ F.embedding(token_ids, weights.candidate_table).transpose(-1, -2)
    own = log_probs.clamp(min=LEAST_LOG_PROB)[:, :, None]
    return torch.cat([matches.float() + out[..., -2:-1].float() * own, out[..., -1:].float()], dim=-1)
