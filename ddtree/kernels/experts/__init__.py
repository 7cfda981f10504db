"""Linear layers of which each row takes its own experts', the same bits for a row whatever the others take.

Letters: R rows, k experts of a row, P = R * k pairs (pair p is row p // k with its expert p % k), E experts, K input and N
output width, F expert width. A CUDA tensor goes to the Triton kernels, any other to the twins; nothing is looked at by the host.
"""

from __future__ import annotations

import torch

from ddtree.kernels.experts.reference import add_up_reference, expert_linear_reference

__all__ = ["add_up", "add_up_reference", "expert_linear", "expert_linear_reference"]


def expert_linear(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *, swiglu: bool = False) -> torch.Tensor:
    """Each pair's row times its expert's weight.

    Args:
        x: [R, K], a row for all k of its pairs, or [P, K], a row a pair.
        weight: [E, N, K] contiguous, of x's dtype; with `swiglu` [E, 2F, K], gates first.
        experts: [R, k] int64.

    Returns:
        [P, N], with `swiglu` silu(gate) * up [P, F]; sums in fp32, rounded once (gate and up before they meet).
    """
    if weight.ndim != 3 or x.ndim != 2 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"x must be [R, K] and weight [E, N, K], got {list(x.shape)} and {list(weight.shape)}")
    if len(x) not in (len(experts), experts.numel()):
        raise ValueError(f"x must have a row for each of {len(experts)} rows or {experts.numel()} pairs, got {len(x)}")
    if weight.dtype != x.dtype or not weight.is_contiguous() or x.stride(1) != 1:
        raise ValueError(f"weight must be contiguous and of x's dtype {x.dtype}, x in rows of one piece, got {weight.dtype}")
    if x.is_cuda:
        from ddtree.kernels.experts.triton import expert_linear_triton

        return expert_linear_triton(x, weight, experts, swiglu)
    return expert_linear_reference(x, weight, experts, swiglu=swiglu)


def add_up(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The k `outputs` [P, N] of each row, weighed by `weights` [R, k], in their order: [R, N], summed in fp32."""
    if outputs.is_cuda:
        from ddtree.kernels.experts.triton import add_up_triton

        return add_up_triton(outputs.contiguous(), weights.contiguous())
    return add_up_reference(outputs, weights)
