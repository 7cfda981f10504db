"""What one request brought, whoever ran it: the text's tokens, the counts beside them, and the times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PLAIN = "0"  # the configuration that every other is compared with
CHAIN = "chain"
FACTORISED = ":factorised"  # after a budget: the drafter's own scores, though there is an adapter
AUTO = "auto"  # the budget chosen each round by cost


def scoring_of(config: str) -> tuple[str, str | None]:
    """A configuration's name without its scoring, and the scoring: None for the model's own."""
    name, _, without = config.partition(":")
    return name, "factorised" if without else None


@dataclass(frozen=True)
class Output:
    """One configuration's answer to one item. Times in seconds."""

    item_id: str
    config: str  # "0", "chain", "auto", or a tree budget as text; FACTORISED may follow
    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    output_tokens: int  # as the engine or the server counts them
    finish_reason: str | None = None
    mode: str | None = None  # ddtree | chain | target_only; None if the server does not say
    reason: str | None = None  # why the mode or the budget is not what was asked for
    tree_budget: int | str | None = None  # in force
    decode_rounds: int = 0
    nodes_verified: int = 0
    trimmed_tokens: int = 0
    cached_tokens: int = 0
    histogram: Mapping[int, int] = field(default_factory=dict)  # acceptance length -> rounds
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    itl_s: tuple[float, ...] = ()  # gaps between emissions
    stage_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return self.config == PLAIN

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self.e2e_s - self.ttft_s

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first: those that `decode_s` was spent on."""
        return max(self.output_tokens - 1, 0)

    @property
    def tpot_s(self) -> float | None:
        return self.decode_s / self.decode_tokens if self.decode_tokens else None
