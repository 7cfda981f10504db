"""Optimiser, weight average and the clock-driven learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from ddtree.training.config import TrainingConfig


class Optimizer:
    """Muon on the layers' matrices and AdamW on the rest, or AdamW on everything; one learning rate for both."""

    def __init__(self, drafter: nn.Module, kind: str, config: TrainingConfig) -> None:
        self.parameters = list(drafter.parameters())
        matrices, stacks, others = [], [], []
        for name, parameter in drafter.named_parameters():
            if kind == "muon" and name == "qkv_weight":
                stacks.append(parameter)
            elif kind == "muon" and parameter.ndim == 2 and name.startswith("layers."):
                matrices.append(parameter)
            else:
                others.append(parameter)
        # the layers' stacked qkv matrices are orthogonalised one by one: views that share storage and gradient
        self.stacks = [(stack, [nn.Parameter(layer.detach()) for layer in stack]) for stack in stacks]
        matrices += [view for _, views in self.stacks for view in views]
        decayed = [parameter for parameter in others if parameter.ndim >= 2 and "norm" not in name_of(drafter, parameter)]
        plain = [parameter for parameter in others if not any(parameter is other for other in decayed)]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self.parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))]
        if matrices:
            self.parts.append(
                torch.optim.Muon(matrices, lr=0.0, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        self.clip_norm = config.clip_norm

    def step(self, learning_rate: float) -> torch.Tensor:
        """Clip, update, clear; returns the gradient norm, 0-d."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        for stack, views in self.stacks:
            for view, gradient in zip(views, stack.grad, strict=True):
                view.grad = gradient
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def name_of(module: nn.Module, parameter: torch.Tensor) -> str:
    return next(name for name, other in module.named_parameters() if other is parameter)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Move the weight average toward the model; early steps count more, so the start is soon forgotten."""
    decay = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def learning_rate(peak: float, step: int, fraction: float, warmup_steps: int) -> float:
    """Linear warm-up by steps, then a cosine to 0 over `fraction` of the training time, in [0, 1]."""
    warmup = min(1.0, (step + 1) / warmup_steps)
    return peak * warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))
