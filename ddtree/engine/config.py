"""What an engine may do, checked once at the edge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine. Lengths in tokens."""

    max_context: int  # prompt and output together
    max_tree_budget: int = 1024  # larger requests are clamped to it
    default_tree_budget: int = 0  # what a request without a budget gets
    prefill_chunk: int = 512  # prompt tokens per engine step
    max_running: int = 1  # sequences decoded side by side in one round

    def __post_init__(self):
        for name in ("max_context", "prefill_chunk", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_tree_budget < 0:
            raise ValueError(f"max_tree_budget must be >= 0, got {self.max_tree_budget}")
        if not 0 <= self.default_tree_budget <= self.max_tree_budget:
            raise ValueError(
                f"default_tree_budget must lie in 0 ... {self.max_tree_budget} (max_tree_budget), "
                f"got {self.default_tree_budget}"
            )
