"""The obvious twins of the fused functions, rounding where the models' modules round."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_reference(hidden: torch.Tensor, weight: torch.Tensor, eps: float, kind: str) -> torch.Tensor:
    """Same arguments and result as `rms_norm`."""
    normed = F.rms_norm(hidden.float(), hidden.shape[-1:], None, eps)
    return normed.to(hidden.dtype) * weight if kind == "plain" else (normed * weight).to(hidden.dtype)


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `swiglu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gate_heads_reference(attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `gate_heads`."""
    return attended * gate.sigmoid()


def norm_and_gate_reference(
    values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Same arguments and result as `norm_and_gate`."""
    normed = F.rms_norm(values.float(), values.shape[-1:], None, eps).to(values.dtype)
    return (normed * weight * F.silu(gate.float())).to(values.dtype)


def argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `argmax`."""
    return logits.masked_fill(logits.isnan(), -torch.inf).argmax(dim=-1)
