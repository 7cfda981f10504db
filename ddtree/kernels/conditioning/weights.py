"""An adapter's weights as the kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch

LEAST_REST = 1e-4  # probability of everything that is no candidate, at least: below it a float32 sum knows no better
LEAST_LOG_PROB = -40.0  # of a drafter's own, as an input


class AdapterWeights(NamedTuple):
    """One dtype throughout, rows contiguous."""

    parent_table: torch.Tensor  # [V, H]
    candidate_table: torch.Tensor  # [V, E]
    mix_weight: torch.Tensor  # [H, H]
    mix_bias: torch.Tensor  # [H]
    out_weight: torch.Tensor  # [E + 2, H]: the query, the weight of the drafter's own log-probabilities, elsewhere
    out_bias: torch.Tensor  # [E + 2]

    def check(self) -> None:
        """Raises ValueError where a shape or dtype does not follow from the tables'."""
        (vocab_size, size), rank = self.parent_table.shape, self.candidate_table.shape[1]
        shapes = ((vocab_size, size), (vocab_size, rank), (size, size), (size,), (rank + 2, size), (rank + 2,))
        dtype = self.parent_table.dtype
        for name, tensor, shape in zip(self._fields, self, shapes, strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.stride(-1) != 1:
                found = f"{list(tensor.shape)} {tensor.dtype}, strides {list(tensor.stride())}"
                raise ValueError(f"{name} must be {list(shape)} {dtype}, rows contiguous, got {found}")
