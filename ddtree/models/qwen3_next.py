"""Qwen3-Next: Qwen3.5's forerunner, with experts, and with the linear layers' projections grouped by key head."""

from __future__ import annotations

from ddtree.models.qwen3_5_moe import Qwen3_5Moe


class Qwen3Next(Qwen3_5Moe):
    """A `TargetModel` for `Qwen3NextForCausalLM`."""

    grouped_projections = True
