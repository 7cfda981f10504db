"""What the engine needs of a target, whatever its architecture.

Letters: R packed rows, C model width, L feature layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ddtree.caches.model_cache import ModelCache
from ddtree.caches.rows import Rows
from ddtree.models.config import ModelConfig


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """What one forward yields; logits are a separate call, since few rows of a prompt need them."""

    hidden: torch.Tensor  # [R, C] after the final norm
    features: torch.Tensor | None  # [R, L*C], the feature layers side by side in the order asked for


class TargetModel(Protocol):
    """A model whose output is to be reproduced exactly."""

    config: ModelConfig

    def new_cache(self) -> ModelCache:
        """An empty cache for one sequence."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[..] int64 -> [.., C]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., C] after the final norm -> [.., V]."""
        ...

    def forward(self, rows: Rows, feature_layers: Sequence[int] = ()) -> ModelOutput:
        """Stage `rows` in their caches and compute them; feature layer L means the output of layer L."""
        ...
