"""A linear layer for few rows, in one launch with the norm before it and the gate or the residual sum after it.

Letters: R packed rows, K input width, N output width, F MLP width (N = F with swiglu).
A row sees no other row: padding may be NaN and spoils only itself, and within one bucket of rows (`plan.BUCKETS`) a row
has the same bits whatever R is; with `batch_invariant` for every R. A CUDA tensor of few rows goes to the Triton kernels; of
more rows to cuBLAS between the kernels of `kernels.fused`, where that is faster; any other tensor to the twin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ddtree.kernels.linear.reference import fused_linear_reference, invariant_linear_reference

__all__ = ["Norm", "fused_linear", "fused_linear_reference", "invariant_linear_reference"]


class Norm(NamedTuple):
    """An RMSNorm before the product; any tuple of these three will do. `weight` [K] and `kind` as in `fused.rms_norm`."""

    weight: torch.Tensor
    eps: float
    kind: str


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float, str] | None = None,
    swiglu: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """norm(`x` [R, K]) @ `weight` [N, K].T + `bias` [N] + `residual` [R, N] -> [R, N], in `out` if given.

    With `swiglu` weight is [2F, K] and bias [2F], gates first, and silu(gate) * up [R, F] is what the residual is added
    to. Sums are fp32, rounded once at the end; gate and up are rounded before they meet, as modules round them.
    `residual` may be `out` itself, `x` may not share memory with it. All but the norm's weight are of one dtype: bf16,
    fp16, or fp32, which is multiplied in IEEE fp32. With `batch_invariant` a row's bits depend on that row alone.
    """
    _check(x, weight, bias, norm, swiglu, residual, out)
    if x.is_cuda:
        from ddtree.kernels.linear.dispatch import fused_linear_cuda

        return fused_linear_cuda(x, weight, bias, norm, swiglu, residual, out, batch_invariant)
    reference = invariant_linear_reference if batch_invariant else fused_linear_reference
    return reference(x, weight, bias=bias, norm=norm, swiglu=swiglu, residual=residual, out=out)


def _check(x, weight, bias, norm, swiglu, residual, out) -> None:
    """
    Raises:
        ValueError: a shape, dtype or layout that does not fit; the message names it.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [R, K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}")
    if swiglu and weight.shape[0] % 2:
        raise ValueError(f"swiglu needs weight of an even number of rows, gates first, got {weight.shape[0]}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if norm is not None and norm[2] not in ("plain", "zero_centred"):
        raise ValueError(f'the kind of norm must be "plain" or "zero_centred", got {norm[2]!r}')
    num_columns = weight.shape[0] // 2 if swiglu else weight.shape[0]
    shapes = {
        "bias": (bias, (weight.shape[0],)),
        "norm weight": (None if norm is None else norm[0], (x.shape[1],)),
        "residual": (residual, (x.shape[0], num_columns)),
        "out": (out, (x.shape[0], num_columns)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "out": out}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} must be of x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, strides are {tensor.stride()}")
