"""The obvious twin of `qk_rotary_pooled`."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def qk_rotary_pooled_reference(
    heads: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    sign: torch.Tensor,
    attention_factor: float,
    scale: torch.Tensor | None,
    kind: str | None,
    eps: float,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_indices: torch.Tensor,
    context_lengths: torch.Tensor,
    query_out: torch.Tensor,
) -> torch.Tensor:
    """Same arguments and effect as `qk_rotary_pooled`."""
    rows = (row_slots >= 0).nonzero().flatten()
    num_heads, num_kv_heads, page_size = query_out.shape[1], key_pages.shape[2], key_pages.shape[1]
    turned = heads[rows, : num_heads + num_kv_heads]
    values = heads[rows, num_heads + num_kv_heads : num_heads + 2 * num_kv_heads]
    if kind is not None:
        turned = _norm(turned, scale, kind, eps)
    turned = _rotate(turned, positions[rows], frequencies, sign, attention_factor)
    slots = row_slots[rows].long()
    places = (context_lengths[slots] + row_indices[rows]).long()
    pages = page_table[slots, places // page_size].long()
    query_out[rows] = turned[:, :num_heads]
    key_pages[pages, places % page_size] = turned[:, num_heads:]
    value_pages[pages, places % page_size] = values
    return query_out


def _norm(heads: torch.Tensor, scale: torch.Tensor, kind: str, eps: float) -> torch.Tensor:
    normed = F.rms_norm(heads.float(), heads.shape[-1:], None, eps)
    return normed.to(heads.dtype) * scale if kind == "plain" else (normed * scale).to(heads.dtype)


def _rotate(
    heads: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    sign: torch.Tensor,
    attention_factor: float,
) -> torch.Tensor:
    """Rotate the first dimensions of `heads` [R, H, D], as many as there are `frequencies`."""
    rotary_dim = frequencies.shape[0]
    angles = positions[:, None].float() * frequencies
    cos = (angles.cos() * attention_factor).to(heads.dtype)[:, None]
    sin = (angles.sin() * sign * attention_factor).to(heads.dtype)[:, None]
    turning = heads[..., :rotary_dim]
    swapped = torch.cat(turning.chunk(2, dim=-1)[::-1], dim=-1)
    return torch.cat((torch.addcmul(turning * cos, swapped, sin), heads[..., rotary_dim:]), dim=-1)
