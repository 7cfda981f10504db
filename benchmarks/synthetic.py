"""A declared acceptance, for models of random weights: how often the target writes which rank of the drafter's ranking.

The round stays real: draft, top candidates, tree, verify, accept and commit all run. Two things are replaced, by device operations
inside the round: the candidates' log-probabilities (random logits would make every tree a star) and which token the target
"chose" after a node: at depth d the drafter's rank r with probability a_d (1 - a_d)^r. Whatever is measured with it is printed
as synthetic.
"""

from __future__ import annotations

import torch

from ddtree.caches.pooled_rows import TREE, PooledRows
from ddtree.engine.device_round import DeviceRound
from ddtree.kernels.conditioning import PathScores

# Per depth, the declared share of positions at which the drafter's first guess is right.
ACCURACIES = (0.82, 0.78, 0.74, 0.71, 0.68, 0.65, 0.63, 0.61, 0.59, 0.57, 0.56, 0.55, 0.54, 0.53, 0.52)


class SyntheticRound(DeviceRound):
    """A round whose matches are drawn from `ACCURACIES`."""

    def draft(self, roots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._candidates, log_probs = super().draft(roots)
        depths, width = self._candidates.shape[1:]
        declared = self._declared(depths, width, roots.device)
        if not self.num_candidates:
            return self._candidates, declared.expand_as(log_probs).contiguous()
        # Scored on their paths for the cost of it; the ranking stays the declared one, below whomever.
        below = declared[None, :, None].expand(len(roots), -1, width, -1).contiguous()
        if isinstance(log_probs, PathScores):
            return self._candidates, PathScores(below, torch.zeros_like(below), torch.zeros_like(below))
        return self._candidates, below

    def verify(self, rows: PooledRows) -> torch.Tensor:
        target_tokens = super().verify(rows)
        if rows.mode != TREE:
            return target_tokens
        num_depths, width = self._candidates.shape[1:]
        below = self.trees.depths.long()  # row of the candidates that follow a node of this depth
        accuracy = self._accuracies(num_depths, rows.token_ids.device)[below.clamp(max=num_depths - 1)]
        ranks = (torch.rand_like(accuracy).log() / (1 - accuracy).log()).long().clamp(max=width - 1)
        sequence = torch.arange(rows.num_rows, device=below.device) // self.shape.rows_each
        drawn = self._candidates[sequence, below.clamp(max=num_depths - 1), ranks]
        return torch.where(below < num_depths, drawn, target_tokens)

    def _accuracies(self, num_depths: int, device: torch.device) -> torch.Tensor:
        if getattr(self, "_accuracy", None) is None:
            self._accuracy = torch.tensor(ACCURACIES[:num_depths], device=device)
        return self._accuracy

    def _declared(self, num_depths: int, width: int, device: torch.device) -> torch.Tensor:
        """[D, M] log-probabilities of the ranks."""
        if getattr(self, "_log_probs", None) is None:
            accuracy = self._accuracies(num_depths, device)[:, None]
            ranks = torch.arange(width, device=device)
            self._log_probs = accuracy.log() + ranks * (1 - accuracy).log()
        return self._log_probs
