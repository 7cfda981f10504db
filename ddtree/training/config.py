"""Settings of sampling and training, checked once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingConfig:
    """How the target writes its own training data. Temperatures are those of assistant turns."""

    tokens: int = 28_000_000
    minutes: float = 2.7
    batch_tokens: int = 4096 * 512  # positions written per batch: sequences x length
    lengths: tuple[int, ...] = (512, 512, 1024)  # batch i takes lengths[i % len]
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    temperature_shares: tuple[float, ...] = (0.65, 0.20, 0.15)
    user_temperature: float = 1.0
    user_min_p: float = 0.03
    user_cap: tuple[int, int] = (64, 220)  # a user turn is ended after a length drawn from this range
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.temperatures) != len(self.temperature_shares):
            raise ValueError("temperatures and temperature_shares must have the same length")
        if min(self.lengths) < 64:
            raise ValueError(f"lengths must be >= 64, got {self.lengths}")
        if self.tokens < 1 or self.minutes <= 0:
            raise ValueError(f"tokens and minutes must be positive, got {self.tokens} and {self.minutes}")


@dataclass(frozen=True)
class TrainingConfig:
    """The drafter's shape and its training. Durations drive the schedule, not step counts."""

    num_layers: int = 4
    intermediate_size: int = 1152
    target_layer_ids: tuple[int, ...] = (2, 11, 20, 27)
    block_size: int = 16
    mask_token_id: int = 4

    tokens_per_step: int = 64 * 512  # context tokens; sequences per step = tokens_per_step / length
    rows_per_token: int = 2  # block rows per context token: 1024 rows (64 anchors of 16) for 512 tokens
    full_block_share: float = 0.7  # of the steps; the others draw a block size from min_block .. block_size - 1
    min_block: int = 4
    user_weight: float = 0.3
    user_anchor_weight: float = 0.1

    optimizer: str = "muon"
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    ema_decay: float = 0.999
    total_minutes: float = 13.0
    minutes_this_run: float = 13.0
    checkpoint_seconds: float = 60.0
    evaluate_seconds: float = 120.0
    eval_anchors: int = 384
    final_eval_anchors: int = 1024
    log_steps: int = 50
    race: str = ""
    race_seconds: float = 30.0
    attention: str = "auto"  # auto, flex or sdpa
    compile: str = "auto"  # auto, on or off
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer must be muon or adamw, got {self.optimizer!r}")
        if self.attention not in ("auto", "flex", "sdpa"):
            raise ValueError(f"attention must be auto, flex or sdpa, got {self.attention!r}")
        if self.compile not in ("auto", "on", "off"):
            raise ValueError(f"compile must be auto, on or off, got {self.compile!r}")
        if not 2 <= self.min_block <= self.block_size:
            raise ValueError(f"min_block must be in 2 .. {self.block_size}, got {self.min_block}")
        for name in ("learning_rate", "total_minutes", "minutes_this_run", "tokens_per_step", "rows_per_token"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class AdapterTrainingConfig:
    """An adapter's shape and its training on a frozen drafter, or jointly with it."""

    width: int = 512
    rank: int = 256
    start: str = ""  # folder of an adapter of the same shape to start from; "grandparent" may start from "none"
    summary: str = "none"  # of the path before the parent: none, grandparent, recurrence or attention
    num_candidates: int = 64
    reach: float = 64.0  # tokens below a path less likely than 1 / reach count for less: no tree goes there; 0 counts all alike
    jointly: bool = False  # the drafter learns too, and is exported beside the adapter
    drafter_rate: float = 0.1  # of the learning rate, for the drafter

    tokens_per_step: int = 32 * 512  # context tokens; sequences per step = tokens_per_step / length
    anchors_per_512: int = 32  # blocks per sequence of 512 tokens
    user_weight: float = 0.3
    user_anchor_weight: float = 0.1

    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    ema_decay: float = 0.999
    total_minutes: float = 6.0
    minutes_this_run: float = 6.0
    checkpoint_seconds: float = 60.0
    eval_anchors: int = 384
    log_steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "total_minutes", "minutes_this_run", "tokens_per_step", "anchors_per_512", "drafter_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
