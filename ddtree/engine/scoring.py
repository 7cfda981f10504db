"""Scores that know the path, for trees that the host builds: an adapter asked level by level (tree.conditioned).

Letters: K block slots, D = K - 1 depths, M candidates per depth, n nodes of a level, C model width.
"""

from __future__ import annotations

import numpy as np
import torch

from ddtree.models.adapter import PAIRWISE
from ddtree.models.conditioning import Conditioning
from ddtree.sampling.choose import rank_scores, rank_strength
from ddtree.sampling.params import SamplingParams
from ddtree.tree.conditioned import ConditionedCandidates


class PathScorer:
    """One sequence's block in one round: its candidates' log-probabilities below any parents."""

    def __init__(self, conditioning: Conditioning, slots, root_token: int, token_ids, log_probs, ranking, strength: float) -> None:
        """`slots` [K, C]; `token_ids`, `log_probs` and `ranking` [D, M] as `Conditioning.log_probs` has them."""
        self.conditioning, self.adapter = conditioning, conditioning.adapter
        self.token_ids, self.own, self.ranking, self.strength = token_ids, log_probs, ranking, strength
        self.root = torch.tensor([root_token], device=slots.device)
        self.places = conditioning.places(slots[None], self.root)[0]
        if self.adapter.config.summary == "grandparent":
            self.grandparent_places = self.adapter.grandparent_places(slots[None])[0]
        self._paths: torch.Tensor | None = None  # of the last level's nodes, what the summary needs

    @property
    def marginals(self) -> np.ndarray:
        """See `tree.conditioned.Scorer`."""
        return self.ranking.cpu().numpy()

    @torch.inference_mode()
    def children(self, depth: int, ranks: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """See `tree.conditioned.Scorer`."""
        tokens = self.root if depth == 1 else self.token_ids[depth - 2][torch.from_numpy(ranks).to(self.root.device)]
        inputs = self.conditioning.parent_rows(tokens) + self.places[depth - 1]
        kind, summary = self.adapter.config.summary, None
        before = None
        if kind != "none" and depth > 1:
            before = self._paths[torch.from_numpy(parents).to(self.root.device)]
        if kind not in PAIRWISE:
            summary, self._paths = self.adapter.extend(inputs, before)
        out = self.adapter.finish(inputs, summary)
        if kind == "grandparent":
            self._paths = tokens
            if before is not None:
                out = out + self._from_grandparents(before, self.grandparent_places[depth - 1])
        return self._log_probs(out, slice(depth - 1, depth))[0]

    @torch.inference_mode()
    def along(self, ranks: np.ndarray) -> np.ndarray:
        """See `tree.conditioned.Scorer`."""
        depths = torch.arange(len(ranks), device=self.root.device)
        tokens = torch.cat([self.root, self.token_ids[depths, torch.from_numpy(ranks).to(self.root.device)]])
        inputs = self.conditioning.parent_rows(tokens) + self.places[: len(tokens)]
        summary = self.adapter.summarise(inputs[None])
        out = self.adapter.finish(inputs, None if summary is None else summary[0])
        if self.adapter.config.summary == "grandparent" and len(tokens) > 1:
            out[1:] += self._from_grandparents(tokens[:-1], self.grandparent_places[1 : len(tokens)])
        return self._log_probs(out[:, None], slice(0, len(tokens)))[:, 0]

    def _from_grandparents(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """What the grandparents [n] add."""
        return self.adapter.finish_grandparents(self.conditioning.grandparent_rows(tokens) + places)

    def _log_probs(self, out: torch.Tensor, depths: slice) -> np.ndarray:
        """`out` [.., n, E + 2] of the depths -> [depths, n, M]."""
        out = out if out.ndim == 3 else out[None]
        scores = self.conditioning.log_probs(out, self.token_ids[depths], self.own[depths], self.ranking[depths], self.strength)
        return scores.cpu().numpy()


def condition(
    conditioning: Conditioning, slots: torch.Tensor, root_token: int, logits: torch.Tensor, params: SamplingParams, noise
) -> ConditionedCandidates:
    """The candidates of one block: `slots` [K, C] and `logits` [D, V] of the drafter, noise [D, V] or None."""
    ranking, token_ids = rank_scores(logits, params, noise).topk(conditioning.num_candidates, dim=-1)
    logits = logits.float()
    log_probs = logits.gather(1, token_ids) - logits.logsumexp(dim=-1, keepdim=True)
    scorer = PathScorer(conditioning, slots, root_token, token_ids, log_probs, ranking, rank_strength(params))
    return ConditionedCandidates(token_ids.cpu().numpy(), scorer)
