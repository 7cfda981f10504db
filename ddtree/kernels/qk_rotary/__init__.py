"""Between an attention's projection and its attention: norm of the query and key heads, rotation, cache write.

Letters: R packed rows, H query heads, Hkv key/value heads, D head dim, S pool slots, P pages.
A CUDA tensor goes to the Triton kernel, any other to the twin.
"""

from __future__ import annotations

import torch

from ddtree.kernels.qk_rotary.reference import qk_rotary_pooled_reference

__all__ = ["qk_rotary_pooled", "qk_rotary_pooled_reference"]


def qk_rotary_pooled(
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
    """Normalise and rotate queries and keys; write queries to `query_out`, keys and values to their staged places.

    Args:
        heads: [R, >= H + 2 * Hkv, D]: queries, keys, values, then heads that are ignored; rows may be strided.
        positions: [R] int32 or int64.
        frequencies, sign: [rotary dim] float32, as `RotaryEmbedding` holds them; dimensions beyond pass through.
        attention_factor: by which cos and sin are multiplied.
        scale: [H + Hkv, D], the norm's weight per head; None without a norm.
        kind: "plain" (rounds to the dtype before the weight), "zero_centred" (fp32 throughout, `scale` is 1 + weight
            in fp32), or None.
        key_pages, value_pages: [P, page_size, Hkv, D] in heads' dtype, changed in place.
        page_table: [S, max_pages] int32.
        row_slots: [R] int32, -1 for padding, of which nothing is read or written.
        row_indices: [R] int32; row r is staged at place context_lengths[slot] + row_indices[r].
        query_out: [R, H, D]; H may be 0.

    Returns:
        `query_out`.
    """
    if kind not in (None, "plain", "zero_centred"):
        raise ValueError(f'kind must be None, "plain" or "zero_centred", got {kind!r}')
    if (kind is None) != (scale is None):
        raise ValueError(f"scale and kind go together; got kind {kind!r} {'without' if scale is None else 'with'} scale")
    turned, num_kv_heads = query_out.shape[1] + key_pages.shape[2], key_pages.shape[2]
    if heads.shape[1] < turned + num_kv_heads or heads.shape[2] != key_pages.shape[3]:
        raise ValueError(
            f"heads is {list(heads.shape)}; {turned + num_kv_heads} heads of dim {key_pages.shape[3]} are needed "
            f"for query_out {list(query_out.shape)} and key_pages {list(key_pages.shape)}"
        )
    if scale is not None and tuple(scale.shape) != (turned, heads.shape[2]):
        raise ValueError(f"scale must be {[turned, heads.shape[2]]}, got {list(scale.shape)}")
    if heads.is_cuda:
        from ddtree.kernels.qk_rotary.triton import qk_rotary_pooled_triton as turn
    else:
        turn = qk_rotary_pooled_reference
    return turn(
        heads,
        positions,
        frequencies,
        sign,
        attention_factor,
        scale,
        kind,
        eps,
        key_pages,
        value_pages,
        page_table,
        row_slots,
        row_indices,
        context_lengths,
        query_out,
    )
