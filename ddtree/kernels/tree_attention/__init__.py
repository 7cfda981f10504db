"""Tree attention: n staged rows of one sequence over its committed prefix and their own ancestors.

Letters: n rows, H query heads, Hkv key/value heads (H a multiple of Hkv), T keys, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ddtree.kernels.tree_attention.pooled import commit_pages, tree_attention_pooled
from ddtree.kernels.tree_attention.reference import tree_attention_reference

__all__ = ["commit_pages", "tree_attention", "tree_attention_pooled", "tree_attention_reference"]


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ancestor_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attend from `query` [n, H, D] to `keys`, `values` [Hkv, T, D]; returns [n, H, D] in query's dtype.

    The first T - n keys are committed and seen by every row; the last n are the rows themselves, and row i sees
    row j when `ancestor_mask[i, j]` ([n, n] bool). None means consecutive tokens: row i sees rows 0 to i.
    """
    num_rows, num_keys = query.shape[0], keys.shape[1]
    mask = None
    # A single row sees every key; a prompt's first chunk is plain causal attention, which needs no mask in memory.
    causal = num_rows > 1 and ancestor_mask is None and num_keys == num_rows
    if num_rows > 1 and not causal:
        mask = _visible(num_rows, num_keys, ancestor_mask, query.device)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[0],
    )
    return attended.squeeze(0).transpose(0, 1)


def _visible(
    num_rows: int, num_keys: int, ancestor_mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """[n, T] bool: which keys each row sees."""
    committed = num_keys - num_rows
    if ancestor_mask is None:
        return torch.ones(num_rows, num_keys, dtype=torch.bool, device=device).tril_(committed)
    return F.pad(ancestor_mask, (committed, 0), value=True)
