"""Row-wise steps between the matrix products, one launch each (argmax: two).

Letters: R packed rows, C model width, F MLP width, H query heads, D head dim, Hv value heads, V value dim or vocabulary.
They round where the models' modules do. Rows do not see one another, so padding spoils only itself. A CUDA tensor goes
to the Triton kernels, any other to the twins.
"""

from __future__ import annotations

import torch

from ddtree.kernels.fused.reference import (
    argmax_reference,
    gate_heads_reference,
    norm_and_gate_reference,
    rms_norm_reference,
    swiglu_reference,
)

__all__ = [
    "argmax",
    "argmax_reference",
    "gate_heads",
    "gate_heads_reference",
    "norm_and_gate",
    "norm_and_gate_reference",
    "rms_norm",
    "rms_norm_reference",
    "swiglu",
    "swiglu_reference",
]


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, kind: str) -> torch.Tensor:
    """`hidden` [R, C] / rms * `weight` [C] -> [R, C].

    `kind` "plain" rounds to hidden's dtype before it multiplies; "zero_centred" multiplies in fp32 by 1 + weight,
    which is what `weight` (fp32) then holds.
    """
    if kind not in ("plain", "zero_centred"):
        raise ValueError(f'kind must be "plain" or "zero_centred", got {kind!r}')
    if hidden.is_cuda:
        from ddtree.kernels.fused.triton import rms_norm_triton

        return rms_norm_triton(hidden, weight, eps, kind)
    return rms_norm_reference(hidden, weight, eps, kind)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [R, 2 * F], gates first -> silu(gate) * up [R, F]."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must be an even number of columns wide, got {gate_up.shape[-1]}")
    if gate_up.is_cuda:
        from ddtree.kernels.fused.triton import swiglu_triton

        return swiglu_triton(gate_up)
    return swiglu_reference(gate_up)


def gate_heads(attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`attended` * sigmoid(`gate`), both [R, H, D]; the gate may be a slice of the projection's heads."""
    if attended.shape != gate.shape:
        raise ValueError(f"gate must be shaped as attended, {list(attended.shape)}, got {list(gate.shape)}")
    if attended.is_cuda:
        from ddtree.kernels.fused.triton import gate_heads_triton

        return gate_heads_triton(attended, gate)
    return gate_heads_reference(attended, gate)


def norm_and_gate(values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each head of `values` [R, Hv, V], by `weight` [V] fp32, times silu(`gate` [R, Hv, V]) -> [R, Hv, V]."""
    if values.shape != gate.shape:
        raise ValueError(f"gate must be shaped as values, {list(values.shape)}, got {list(gate.shape)}")
    if values.is_cuda:
        from ddtree.kernels.fused.triton import norm_and_gate_triton

        return norm_and_gate_triton(values, gate, weight, eps)
    return norm_and_gate_reference(values, gate, weight, eps)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The id of each row's largest logit, `logits` [R, V] -> [R] int64; ties go to the lowest id, NaN never wins."""
    if logits.is_cuda:
        from ddtree.kernels.fused.triton import argmax_triton

        return argmax_triton(logits)
    return argmax_reference(logits)
