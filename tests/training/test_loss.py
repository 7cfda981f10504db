"""The chunked cross entropy is the plain one, gradient included."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ddtree.training.loss import block_loss, chunked_cross_entropy


def test_loss_and_gradient_equal_autograd():
    hidden, head = torch.randn(37, 16, requires_grad=True), torch.randn(53, 16)
    labels, weights = torch.randint(0, 53, (37,)), torch.rand(37)
    total, losses = chunked_cross_entropy(hidden, head, labels, weights, chunk_rows=8)
    (2 * total).backward()
    chunked, hidden.grad = hidden.grad, None
    plain = F.cross_entropy(hidden @ head.T, labels, reduction="none")
    (2 * (plain * weights).sum()).backward()
    torch.testing.assert_close(losses, plain.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chunked, hidden.grad, rtol=1e-4, atol=1e-5)


def test_rows_of_weight_zero_neither_count_nor_learn():
    hidden, head = torch.randn(2, 6, 16, requires_grad=True), torch.randn(53, 16)
    labels, weights = torch.randint(0, 53, (2, 6)), torch.rand(2, 6)
    weights[:, ::2] = 0
    loss, total_weight = block_loss(hidden, head, labels, weights)
    loss.backward()
    plain = F.cross_entropy(hidden.flatten(0, 1) @ head.T, labels.flatten(), reduction="none").view(2, 6)
    torch.testing.assert_close(loss, (plain * weights).sum() / weights.sum())
    torch.testing.assert_close(total_weight, weights.sum())
    assert (hidden.grad[:, ::2] == 0).all() and (hidden.grad[:, 1::2] != 0).any()
