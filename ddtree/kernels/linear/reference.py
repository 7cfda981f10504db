"""The obvious twin: each step by itself, sums in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ddtree.kernels.fused.reference import rms_norm_reference, swiglu_reference


def fused_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float, str] | None = None,
    swiglu: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same arguments and result as `fused_linear`."""
    if norm is not None:
        x = rms_norm_reference(x, *norm)
    result = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if swiglu:
        result = swiglu_reference(result.to(x.dtype)).float()
    if residual is not None:
        result = result + residual.float()
    result = result.to(x.dtype)
    return result if out is None else out.copy_(result)


def invariant_linear_reference(x: torch.Tensor, weight: torch.Tensor, *, residual=None, out=None, **steps) -> torch.Tensor:
    """Same arguments and result as `fused_linear` with `batch_invariant`: one row after another, each by itself."""
    width = weight.shape[0] // 2 if steps.get("swiglu") else weight.shape[0]
    out = x.new_empty(x.shape[0], width) if out is None else out
    for row in range(x.shape[0]):
        own = slice(row, row + 1)
        added = None if residual is None else residual[own]
        fused_linear_reference(x[own], weight, residual=added, out=out[own], **steps)
    return out
