"""A mixture of experts without a look at the device: how many rows an expert has stays there.

Letters: R packed rows, C model width, E experts, k experts per token, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ddtree.kernels.experts import add_up, expert_linear
from ddtree.kernels.fused import swiglu
from ddtree.kernels.linear import fused_linear
from ddtree.models.moe import MoE


def moe_pooled(moe: MoE, hidden: torch.Tensor) -> torch.Tensor:
    """[R, C] -> [R, C]: as `MoE.forward`, each row's experts added up in the order of their weights."""
    weights, experts = moe._route(hidden)
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        outputs = grouped(moe, hidden, experts)
    else:
        outputs = gathered(moe, hidden, experts)
    out = (outputs * weights.unsqueeze(-1)).sum(dim=1)
    if moe.shared_expert is None:
        return out
    shared = moe.shared_expert
    return out + moe.shared_gate(hidden).sigmoid() * shared.down_proj(swiglu(shared.gate_up_proj(hidden)))


def moe_invariant(moe: MoE, hidden: torch.Tensor) -> torch.Tensor:
    """As `moe_pooled`, each row's bits its own, whatever the others take."""

    def linear(module, rows: torch.Tensor, **steps) -> torch.Tensor:
        return fused_linear(rows, module.weight, bias=module.bias, batch_invariant=True, **steps)

    weights, experts = moe.choose_experts(linear(moe.router, hidden))
    inner = expert_linear(hidden, moe.gate_up_proj, experts, swiglu=True)
    out = add_up(expert_linear(inner, moe.down_proj, experts), weights)
    if moe.shared_expert is None:
        return out
    shared = linear(moe.shared_expert.gate_up_proj, hidden, swiglu=True)
    return out + linear(moe.shared_gate, hidden).sigmoid() * linear(moe.shared_expert.down_proj, shared)


def grouped(moe: MoE, hidden: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Each row through each of its `experts` [R, k] -> [R, k, C], one product over the rows sorted by expert."""
    num_rows, per_row = experts.shape
    order = experts.flatten().argsort(stable=True)
    counts = F.one_hot(experts.flatten(), moe.config.num_experts).sum(dim=0)
    ends = counts.cumsum(dim=0).to(torch.int32)
    rows = hidden[order // per_row]
    inner = swiglu(torch._grouped_mm(rows, moe.gate_up_proj.transpose(1, 2), offs=ends))
    outputs = torch._grouped_mm(inner, moe.down_proj.transpose(1, 2), offs=ends)
    unsorted = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return unsorted.view(num_rows, per_row, -1)


def gathered(moe: MoE, hidden: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The same with every row's weights copied out: for small models and other dtypes."""
    num_rows, per_row = experts.shape
    rows = hidden.unsqueeze(1).expand(-1, per_row, -1).reshape(num_rows * per_row, -1, 1)
    inner = torch.bmm(moe.gate_up_proj[experts.flatten()], rows).squeeze(-1)
    outputs = torch.bmm(moe.down_proj[experts.flatten()], swiglu(inner).unsqueeze(-1))
    return outputs.view(num_rows, per_row, -1)
