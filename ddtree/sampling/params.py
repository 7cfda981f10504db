"""How tokens are chosen: the sampling parameters of a request, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Temperature and filters, applied in the order temperature, top-k, top-p, min-p.

    Raises ValueError, naming field, value and remedy, for anything out of range or not a number.
    """

    temperature: float = 0.0  # 0 is greedy: the filters then have no effect
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off

    def __post_init__(self) -> None:
        for field in ("temperature", "top_p", "min_p"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{field} must be a finite number, got {value!r}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int):
            raise ValueError(f"top_k must be an integer, got {self.top_k!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}; use 0 for greedy decoding")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; use 1 to switch it off")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}; use 0 to switch it off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; use 0 to switch it off")

    @property
    def greedy(self) -> bool:
        """Whether the choice is the argmax, without noise."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether a filter can exclude tokens from the draw."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)
