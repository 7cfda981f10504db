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
    max_rows: int = 0  # of one verify forward, over all its trees, which are cut to it; 0: as many as they have
    max_stall_s: float = 0.0  # that a prefill chunk may hold up those that decode; 0: a whole chunk
    cache_bytes: int = 0  # of what running and remembered sequences hold; 0: max_running alone is the limit
    prefix_bytes: int = 0  # of cache_bytes, that prefixes may be remembered in; 0: none are
    snapshot_every: int = 512  # prompt tokens between the states that a hybrid's prefix is remembered by
    request_timeout_s: float = 0.0  # from its arrival, after which a request ends with an error; 0: never
    queue_timeout_s: float = 0.0  # of waiting, after which it is refused; 0: never
    batch_invariant: bool = False  # over pools: a token's logits go by what is before it alone, to the last bit

    def __post_init__(self):
        at_least_one = ("max_context", "prefill_chunk", "max_running", "snapshot_every")
        not_negative = ("max_tree_budget", "max_rows", "max_stall_s", "cache_bytes", "prefix_bytes", "request_timeout_s", "queue_timeout_s")
        for least, names in ((1, at_least_one), (0, not_negative)):
            for name in names:
                if getattr(self, name) < least:
                    raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.max_rows and self.max_rows < self.max_running:
            raise ValueError(
                f"max_rows must be >= max_running, one row a sequence, or 0, got {self.max_rows} and {self.max_running}"
            )
        if not 0 <= self.default_tree_budget <= self.max_tree_budget:
            raise ValueError(
                f"default_tree_budget must lie in 0 ... {self.max_tree_budget} (max_tree_budget), "
                f"got {self.default_tree_budget}"
            )
