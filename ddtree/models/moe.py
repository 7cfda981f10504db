"""A mixture of experts in an MLP's place: a router, routed experts, and perhaps one shared by every token.

Letters: R packed rows, C model width, E experts, k experts per token, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ddtree.models.family_config import MoeConfig
from ddtree.models.layers import MLP, NamedTensors, linear, linear_tensors


class MoE(nn.Module):
    """sum of weight * expert(x) over the k experts with the largest router probability (+ gate * shared(x))."""

    def __init__(
        self, hidden_size: int, config: MoeConfig, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        num_experts, width = config.num_experts, config.intermediate_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)

        self.router = linear(hidden_size, num_experts, False, device, dtype)
        self.gate_up_proj = parameter(num_experts, 2 * width, hidden_size)
        self.down_proj = parameter(num_experts, hidden_size, width)
        self.shared_expert = self.shared_gate = None
        if config.shared_intermediate_size is not None:
            self.shared_expert = MLP(
                hidden_size, config.shared_intermediate_size, bias=False, device=device, dtype=dtype
            )
            self.shared_gate = linear(hidden_size, 1, False, device, dtype)

    def checkpoint_tensors(self, prefix: str) -> NamedTensors:
        """Experts in their fused form; `published.Naming` takes them apart where the checkpoint does."""
        yield from linear_tensors(f"{prefix}.gate", self.router)
        yield f"{prefix}.experts.gate_up_proj", self.gate_up_proj.data
        yield f"{prefix}.experts.down_proj", self.down_proj.data
        if self.shared_expert is not None:
            yield from self.shared_expert.checkpoint_tensors(f"{prefix}.shared_expert")
            yield from linear_tensors(f"{prefix}.shared_expert_gate", self.shared_gate)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, C] -> [R, C]."""
        out = self._routed(hidden, *self._route(hidden))
        if self.shared_expert is None:
            return out
        return out + self.shared_gate(hidden).sigmoid() * self.shared_expert(hidden)

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids of each row's experts, both [R, k]."""
        return self.choose_experts(self.router(hidden))

    def choose_experts(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by the router's `scores` [R, E]; probabilities in fp32, weights in the scores' dtype."""
        probabilities = scores.softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.config.experts_per_token, dim=-1)
        if self.config.normalise_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(scores.dtype), experts

    def _routed(self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """`hidden` [R, C], `weights` and `experts` [R, k] -> [R, C], added up in the order of the experts.

        Waits once for the device, to learn how many rows each expert has.
        """
        out = torch.zeros_like(hidden)
        by_expert = experts.flatten().argsort(stable=True)
        rows = by_expert // experts.shape[1]
        weights = weights.flatten()[by_expert].unsqueeze(-1)
        counts = torch.bincount(experts.flatten(), minlength=self.config.num_experts).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            own = slice(start, start + count)
            gate, up = F.linear(hidden[rows[own]], self.gate_up_proj[expert]).chunk(2, dim=-1)
            out.index_add_(0, rows[own], F.linear(F.silu(gate) * up, self.down_proj[expert]) * weights[own])
            start += count
        return out
