"""The obvious twin of `tree_attention`: one row and one head at a time, softmax in fp32. Nobody optimises it."""

from __future__ import annotations

import torch


def tree_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ancestor_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Same arguments and result as `tree_attention`: `query` [n, H, D], `keys` and `values` [Hkv, T, D]."""
    num_rows, num_heads, _ = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    committed = num_keys - num_rows
    attended = torch.zeros_like(query)
    for row in range(num_rows):
        seen = list(range(committed))
        for other in range(num_rows):
            if other <= row if ancestor_mask is None else ancestor_mask[row, other]:
                seen.append(committed + other)
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scores = keys[kv_head, seen].float() @ query[row, head].float() * scale
            attended[row, head] = (torch.softmax(scores, dim=0) @ values[kv_head, seen].float()).to(
                query.dtype
            )
    return attended
