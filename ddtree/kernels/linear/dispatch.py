"""CUDA tensors: the streaming kernels where they win, else cuBLAS between the kernels of `kernels.fused`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ddtree.kernels import fused
from ddtree.kernels.linear.plan import Plan, plan_invariant, plan_of


def fused_linear_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float, str] | None,
    swiglu: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Same arguments and result as `fused_linear`."""
    if batch_invariant:
        from ddtree.kernels.linear.triton_invariant import invariant_linear_triton

        x = x if norm is None else fused.rms_norm(x, *norm)
        return invariant_linear_triton(x, weight, bias, swiglu, residual, out, plan_invariant(weight, swiglu))
    plan = plan_of(x.shape[0], weight, swiglu)
    if plan is None:
        return fused_linear_cublas(x, weight, bias, norm, swiglu, residual, out)
    return fused_linear_planned(x, weight, bias, norm, swiglu, residual, out, plan)


def fused_linear_planned(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float, str] | None,
    swiglu: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    plan: Plan,
) -> torch.Tensor:
    """The same by the streaming kernels, as `plan` says."""
    from ddtree.kernels.linear.triton import fused_linear_triton

    if norm is not None and (plan.norm_first or x.dtype == torch.float16):
        # fp16 may have no room for what the kernels divide by the rms only after the product.
        x, norm = fused.rms_norm(x, *norm), None
    return fused_linear_triton(x, weight, bias, norm, swiglu, residual, out, plan)


def fused_linear_cublas(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float, str] | None,
    swiglu: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The same in up to four launches. Works on any device."""
    if norm is not None:
        x = fused.rms_norm(x, *norm)
    if swiglu:
        gated = fused.swiglu(F.linear(x, weight, bias))
        if residual is not None:
            return torch.add(gated, residual, out=out)
        return gated if out is None else out.copy_(gated)
    if residual is not None and bias is not None:
        residual = torch.add(residual, bias)
    if residual is not None:
        if out is residual:
            return out.addmm_(x, weight.t())
        return torch.addmm(residual, x, weight.t(), out=out)
    if bias is not None:
        return torch.addmm(bias, x, weight.t(), out=out)
    return torch.mm(x, weight.t(), out=out)
