"""Rows: what one target forward processes, packed over sequences.

Letters: R rows of all sequences together, n rows of one sequence.
A sequence's rows are either its draft tree's nodes (verify) or consecutive prompt tokens (prefill).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ddtree.caches.model_cache import ModelCache


@dataclass(frozen=True, eq=False)
class Span:
    """The rows of one sequence inside a forward."""

    cache: ModelCache
    start: int
    stop: int
    ancestor_mask: torch.Tensor | None  # [n, n] bool on the device; None means consecutive tokens (causal)
    parents: torch.Tensor | None  # [n] int64 on the device, -1 for the root; None means consecutive tokens

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows: sequence s owns rows spans[s].start to spans[s].stop."""

    token_ids: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64; context length + depth
    spans: tuple[Span, ...]
