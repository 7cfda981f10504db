"""The obvious twins: one pair after another."""

from __future__ import annotations

import torch

from ddtree.kernels.linear.reference import fused_linear_reference


def expert_linear_reference(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *, swiglu: bool = False) -> torch.Tensor:
    """Same arguments and result as `expert_linear`."""
    each = experts.numel() // max(len(x), 1)
    rows = [
        fused_linear_reference(x[pair // each][None], weight[expert], swiglu=swiglu)
        for pair, expert in enumerate(experts.flatten().tolist())
    ]
    width = weight.shape[1] // 2 if swiglu else weight.shape[1]
    return torch.cat(rows) if rows else x.new_empty(0, width)


def add_up_reference(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `add_up`."""
    pairs = outputs.float().view(*weights.shape, -1)
    total = torch.zeros_like(pairs[:, 0])
    for place in range(weights.shape[1]):
        total = total + pairs[:, place] * weights[:, place, None].float()
    return total.to(outputs.dtype)
