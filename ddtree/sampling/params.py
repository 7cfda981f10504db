"""How tokens are chosen: the sampling parameters of a request, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """Temperature and filters, applied in the order temperature, top-k, top-p, min-p; before them penalties and bias.

    Presence and frequency count emitted tokens, repetition the prompt's as well; each node's along its own path.

    Raises ValueError, naming field, value and remedy, for anything out of range or not a number.
    """

    temperature: float = 0.0  # 0 is greedy: the filters then have no effect
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    presence_penalty: float = 0.0  # taken from the logit of every token emitted so far
    frequency_penalty: float = 0.0  # the same, times how often
    repetition_penalty: float = 1.0  # positive logits of tokens seen are divided by it, negative ones multiplied
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    min_tokens: int = 0  # until so many are emitted, no token that ends the generation can be drawn

    def __post_init__(self) -> None:
        for field in NUMBERS:
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{field} must be a finite number, got {value!r}")
        for field in ("top_k", "min_tokens"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{field} must be an integer, got {value!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}; use 0 for greedy decoding")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; use 1 to switch it off")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}; use 0 to switch it off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; use 0 to switch it off")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be > 0, got {self.repetition_penalty}; use 1 to switch it off")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be >= 0, got {self.min_tokens}; use 0 to switch it off")
        for token_id, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias must be finite, got {bias} for token {token_id}")

    @property
    def greedy(self) -> bool:
        """Whether the choice is the argmax, without noise."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether a filter can exclude tokens from the draw."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def adjusted(self) -> bool:
        """Whether logits are changed before the choice: penalties, bias, min_tokens."""
        return self.penalised or bool(self.logit_bias) or self.min_tokens > 0
