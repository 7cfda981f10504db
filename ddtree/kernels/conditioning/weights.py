"""An adapter's weights as the kernels take them, and what they make of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

LEAST_REST = 1e-4  # probability of everything that is no candidate, at least: below it a float32 sum knows no better
LEAST_LOG_PROB = -40.0  # of a drafter's own, as an input


class AdapterWeights(NamedTuple):
    """One dtype throughout, rows contiguous. A ancestors count: 1, the parent alone; 2, the grandparent too."""

    parent_tables: torch.Tensor  # [A, V, H]
    candidate_table: torch.Tensor  # [V, E]
    mix_weights: torch.Tensor  # [A, H, H]
    mix_biases: torch.Tensor  # [A, H]
    out_weights: torch.Tensor  # [A, E + 2, H]: the query, the weight of the drafter's own log-probabilities, elsewhere
    out_biases: torch.Tensor  # [A, E + 2]

    def check(self) -> None:
        """Raises ValueError where a shape or dtype does not follow from the tables'."""
        (num_ancestors, vocab_size, size), rank = self.parent_tables.shape, self.candidate_table.shape[1]
        if num_ancestors not in (1, 2):
            raise ValueError(f"parent_tables must have 1 or 2 ancestors, got {num_ancestors}")
        square, out = (num_ancestors, size, size), (num_ancestors, rank + 2, size)
        shapes = ((num_ancestors, vocab_size, size), (vocab_size, rank), square, (num_ancestors, size), out, out[:2])
        dtype = self.parent_tables.dtype
        for name, tensor, shape in zip(self._fields, self, shapes, strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                found = f"{list(tensor.shape)} {tensor.dtype}, strides {list(tensor.stride())}"
                raise ValueError(f"{name} must be {list(shape)} {dtype}, rows contiguous, got {found}")


class PathScores(NamedTuple):
    """Scores below two tokens, in two tables instead of one of M^3 entries a depth; all float32.

    Candidate c at depth k + 1 below candidate p at depth k and candidate g at depth k - 1 has the log-probability
    `min(below_parent[b, k, p, c] + below_grandparent[b, k, g, c] - norms[b, k, g, p], 0)`. The root is candidate 0 of depth 0,
    and of the depth before it.
    """

    below_parent: torch.Tensor  # [B, D, M, M]; -inf excludes
    below_grandparent: torch.Tensor  # [B, D, M, M], finite; zero at depth 1
    norms: torch.Tensor  # [B, D, M, M]

    def rows(self, depth: int, grandparent: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [B, n, M] of the candidates at `depth` (from 1) below n pairs of candidates, each [n] int64."""
        k = depth - 1
        scores = self.below_parent[:, k, parents] + self.below_grandparent[:, k, grandparent]
        return (scores - self.norms[:, k, grandparent, parents][..., None]).clamp(max=0.0)
