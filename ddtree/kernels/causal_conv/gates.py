"""Gates: how much each head of a Gated-DeltaNet layer forgets and writes at each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Gates(NamedTuple):
    """What the gates are made of, [R, Hv] and [Hv], and where they go, [>= R, Hv] fp32 and contiguous. A
    convolution that is given them computes them in its own launch.
    """

    a: torch.Tensor  # [R, Hv], columns of the input projection
    b: torch.Tensor  # [R, Hv], likewise
    decay_rate: torch.Tensor  # [Hv] fp32, -exp(A_log)
    dt_bias: torch.Tensor  # [Hv] fp32
    log_decay: torch.Tensor  # written: decay_rate * softplus(a + dt_bias)
    beta: torch.Tensor  # written: sigmoid(b), rounded to b's dtype as the published models do

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, decay_rate: torch.Tensor, dt_bias: torch.Tensor) -> Gates:
        """With new tensors for the results."""
        log_decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
        return cls(a, b, decay_rate, dt_bias, log_decay, torch.empty_like(log_decay))


def gates_pooled(
    a: torch.Tensor, b: torch.Tensor, decay_rate: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`a`, `b` [R, Hv] (may be columns of something wider), `decay_rate`, `dt_bias` [Hv] fp32 -> log_decay, beta,
    [R, Hv] fp32.
    """
    gates = Gates.of(a, b, decay_rate, dt_bias)
    if a.is_cuda:
        from ddtree.kernels.causal_conv.triton_gates import run_gates

        run_gates(gates)
    else:
        gates_twin(gates)
    return gates.log_decay, gates.beta


def gates_twin(gates: Gates) -> None:
    """The obvious twin of the kernel."""
    rows = slice(0, gates.a.shape[0])
    gates.log_decay[rows] = gates.decay_rate * F.softplus(gates.a.float() + gates.dt_bias)
    gates.beta[rows] = gates.b.sigmoid().float()
