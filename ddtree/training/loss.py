"""Cross entropy through the frozen head without ever holding all logits.

The head does not learn, so the gradient with respect to the hidden states is known as soon as the logits are: each
chunk of rows is finished, gradient included, before the next begins. Peak memory is one chunk of logits.
Letters: N rows, C model width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK_ROWS = 8192


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, labels, weights, chunk_rows):
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = F.linear(hidden[rows].to(head.dtype), head)
            # softmax in float32 inside the kernel, stored in the head's dtype
            log_probs = torch.log_softmax(logits, dim=-1)
            label = labels[rows, None]
            losses[rows] = -log_probs.gather(1, label)[:, 0].float()
            difference = log_probs.exp_()
            difference.scatter_add_(1, label, torch.full_like(label, -1, dtype=difference.dtype))
            gradient[rows] = (difference @ head).to(hidden.dtype) * weights[rows, None].to(hidden.dtype)
            del logits, log_probs, difference
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx, grad_total, grad_losses):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total.to(gradient.dtype), None, None, None, None


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the cross entropies of `hidden [N, C]` against `labels [N]`, and each row's `[N]`.

    `head [V, C]` is frozen; its dtype is that of the logits. Only `hidden` receives a gradient.
    """
    return _ChunkedCrossEntropy.apply(hidden, head, labels, weights, chunk_rows)


def block_loss(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean loss of `hidden [S, R, C]` with `labels`, `weights [S, R]`; rows of weight 0 skip the head.

    Also returns the total weight, 0-d.
    """
    chosen = weights.flatten().nonzero()[:, 0]
    rows = hidden.flatten(0, 1)[chosen]
    total_weight = weights.sum().clamp_min(1e-6)
    total, _ = chunked_cross_entropy(rows, head, labels.flatten()[chosen], weights.flatten()[chosen] / total_weight)
    return total, total_weight
