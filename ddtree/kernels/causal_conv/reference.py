"""The obvious twin of the causal convolution: one row and one tap at a time. Nobody optimises it."""

from __future__ import annotations

import torch


def causal_conv_tree_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    parents: torch.Tensor | None,
) -> torch.Tensor:
    """Same arguments and result as `causal_conv_tree`: `x` [N, C] -> [N, C]."""
    num_rows, width = x.shape[0], weight.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x)
    for row in range(num_rows):
        total = torch.zeros(x.shape[1], dtype=dtype) if bias is None else bias.to(dtype)
        place = row
        for tap in reversed(range(width)):
            inputs = x[place] if place >= 0 else state[place]
            total = total + inputs.to(dtype) * weight[:, tap].to(dtype)
            # Below zero, places count back from the newest row of the state.
            place = place - 1 if parents is None or place < 0 else int(parents[place])
        out[row] = (total * torch.sigmoid(total)).to(x.dtype)
    return out


def causal_conv_commit_reference(x: torch.Tensor, state: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `causal_conv_commit`: rows pushed one by one, the oldest falling out."""
    rows = list(state)
    for row in path.tolist():
        rows = [*rows[1:], x[row].to(state.dtype)]
    return torch.stack(rows)


def causal_conv_prefill_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and result as `causal_conv_prefill`."""
    every_row = torch.arange(x.shape[0])
    out = causal_conv_tree_reference(x, weight, bias, state, None)
    return out, causal_conv_commit_reference(x, state, every_row)
