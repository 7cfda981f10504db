"""An adapter at work: bound to the target whose embedding and head it reads, its corrections make the drafter's scores know their parents.

Letters: B blocks, K slots, D = K - 1 depths, N parents, M candidates, V vocabulary, C model width, H adapter width, E rank.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from ddtree.kernels.conditioning import LEAST_REST, AdapterWeights, PathScores, transitions_pooled
from ddtree.models.adapter import Adapter

SERVED_CANDIDATES = 64  # per depth; more brought nothing, docs/log.md 2026-11-30


def conditioned(log_probs: torch.Tensor, corrections: torch.Tensor) -> torch.Tensor:
    """Normalised log-probabilities of the candidates and, last, of everything else.

    `log_probs` [..., M], of which e**x adds up to at most 1; `corrections` [..., M + 1], broadcast against them.
    """
    rest = torch.log1p(-log_probs.exp().sum(dim=-1, keepdim=True).clamp(max=1 - LEAST_REST))
    return (torch.cat([log_probs, rest], dim=-1) + corrections).log_softmax(dim=-1)


class Conditioning:
    """An adapter bound to the target whose embedding and head it reads.

    With `tables`, what depends on a token alone is computed once, (H + E) values a token; else when it is wanted, which
    for a few parents on a CPU costs less than reading a table would.
    """

    def __init__(self, adapter: Adapter, target_model: Any, *, tables: bool) -> None:
        self.adapter, self.target_model = adapter, target_model
        self.acceptance: dict[str, dict[str, float]] | None = None  # mean acceptance lengths: temperature -> budget -> length
        self.parent_table = self.candidate_table = self.grandparent_table = None
        if tables:
            self._tabulate()

    @torch.no_grad()
    def _tabulate(self) -> None:
        adapter, model = self.adapter, self.target_model
        if adapter.config.summary == "grandparent":
            self.grandparent_table = adapter.grandparent_token(model.embed_tokens)
        self.parent_table = adapter.parent_token(model.embed_tokens)
        self.candidate_table = adapter.candidate_token(model.lm_head.weight)

    @property
    def num_candidates(self) -> int:
        """Candidates per depth that are scored."""
        config = self.target_model.config
        return min(SERVED_CANDIDATES, self.adapter.config.num_candidates, config.vocab_size)

    def places(self, slots: torch.Tensor, root_tokens: torch.Tensor) -> torch.Tensor:
        """`slots` [B, K, C] and `root_tokens` [B] -> [B, D, H]."""
        return self.adapter.places(slots, self.target_model.embed(root_tokens))

    def parent_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., H]."""
        if self.parent_table is not None:
            return F.embedding(token_ids, self.parent_table)
        return self.adapter.parent_token(self.target_model.embed(token_ids))

    def grandparent_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`parent_rows` of the grandparents: [...] int64 -> [..., H]."""
        if self.grandparent_table is not None:
            return F.embedding(token_ids, self.grandparent_table)
        return self.adapter.grandparent_token(self.target_model.embed(token_ids))

    def matches(self, out: torch.Tensor, candidate_ids: torch.Tensor) -> torch.Tensor:
        """`out` [..., N, E + 2] and `candidate_ids` [..., M] -> [..., N, M]."""
        query = out[..., :-2]
        if self.candidate_table is not None:
            return query @ F.embedding(candidate_ids, self.candidate_table).transpose(-1, -2)
        # Few queries meet many candidates: the queries take the detour through the rank.
        head = F.embedding(candidate_ids, self.target_model.lm_head.weight)
        return (query @ self.adapter.candidate_token.weight) @ head.transpose(-1, -2)

    def log_probs(self, out, candidate_ids, log_probs, ranking, strength) -> torch.Tensor:
        """What the drafter ranks with, conditioned on N parents: [..., N, M] float32, normalised with everything else.

        Args:
            out: [..., N, E + 2].
            candidate_ids: [..., M] int64.
            log_probs: [..., M] float32, the drafter's own, at temperature 1 and without noise.
            ranking: [..., M] float32, normalised over the vocabulary (`sampling.choose.rank_scores`).
            strength: float, or a tensor that broadcasts against the result: what a nat of correction is worth in the ranking.
        """
        corrections = self.adapter.corrections(out, self.matches(out, candidate_ids), log_probs).float()
        return conditioned(ranking[..., None, :], corrections * strength)[..., :-1]

    def transitions(self, slots, root_tokens, candidate_ids, log_probs, ranking, strengths) -> torch.Tensor | PathScores:
        """Every candidate's score below every candidate of the depth before, for an adapter that looks no further back than
        the grandparent.

        Args:
            slots: [B, K, C], the drafter's states.
            root_tokens: [B] int64.
            candidate_ids: [B, D, M] int64; log_probs, ranking alike, float32, see `log_probs`.
            strengths: [B] float32.

        Returns:
            [B, D, M, M] float32: [b, k, p, c] of candidate c at depth k + 1 below candidate p at depth k; at depth 1 every
            parent is the root. With grandparents a `PathScores`.
        """
        places = self.places(slots, root_tokens)[None]
        if self.adapter.config.summary == "grandparent":
            places = torch.cat([places, self.adapter.grandparent_places(slots)[None]])
        return transitions_pooled(places, root_tokens, candidate_ids, log_probs, ranking, strengths, self.weights)

    @cached_property
    def weights(self) -> AdapterWeights:
        """What `transitions` reads, as its kernels want it."""
        adapter = self.adapter
        if self.parent_table is None:
            self._tabulate()
        layers = [(self.parent_table, adapter.mix.weight, adapter.mix.bias, adapter.out.weight, adapter.out.bias)]
        if adapter.config.summary == "grandparent":
            mix, out = adapter.grandparent_mix, adapter.grandparent_out
            layers.append((self.grandparent_table, mix.weight, mix.bias, out.weight, out.bias))
        parents, mixes, mix_biases, outs, out_biases = (torch.stack(tensors).detach() for tensors in zip(*layers, strict=True))
        # Large, so kept once.
        self.parent_table, self.grandparent_table = parents[0], parents[1] if len(parents) > 1 else None
        return AdapterWeights(parents, self.candidate_table, mixes, mix_biases, outs, out_biases)
