"""Attention for SGLang on a CPU that reads a tree's mask: SDPA, a sequence at a time.

SGLang's own CPU backends take a verify for a chain. This one stands behind the name of its SDPA backend, since SGLang knows
by that name that no Triton kernels are to be launched. B sequences, N nodes, T committed tokens, H query heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from ddtree.sglang.plugin import ATTENTION_BACKEND


class MaskedAttention(TorchNativeAttnBackend):
    """SGLang's SDPA backend, which verifies trees by their mask."""

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **more):
        """Rows of a prefill go the stock way; a verify's rows [B * N, H * D] see what their tree's mask says."""
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)
        if save_kv_cache:
            self._write(layer, forward_batch.out_cache_loc, k, v)
        num_nodes = forward_batch.spec_info.draft_token_num
        query = q.view(-1, num_nodes, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        table, mask = self.req_to_token_pool.req_to_token, forward_batch.spec_info.custom_mask
        out, taken = [], 0
        pairs = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        for index, (row, context_length) in enumerate(pairs):
            num_keys = context_length + num_nodes
            visible = mask[taken : taken + num_nodes * num_keys].view(num_nodes, num_keys)
            taken += num_nodes * num_keys
            if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
                visible = visible & self._within(forward_batch, index, num_nodes, context_length, layer.sliding_window_size)
            slots = table[row, :num_keys]
            attended = F.scaled_dot_product_attention(
                query[index].transpose(0, 1)[None],
                keys[slots].transpose(0, 1)[None].to(q.dtype),
                values[slots].transpose(0, 1)[None].to(q.dtype),
                attn_mask=visible,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            out.append(attended[0].transpose(0, 1).reshape(num_nodes, -1))
        return torch.cat(out)

    def _write(self, layer, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, self.swa_out_cache_loc), keys, values)

    def _within(self, forward_batch, index: int, num_nodes: int, context_length: int, window: int) -> torch.Tensor:
        """[N, T + N] bool: the keys no further than `window` positions behind each node."""
        nodes = forward_batch.positions.view(-1, num_nodes)[index]
        positions = torch.cat([torch.arange(context_length, device=nodes.device), nodes])
        return nodes[:, None] - positions <= window


def install() -> None:
    """From now on in this process, the name of SGLang's SDPA backend means this one."""
    register_attention_backend(ATTENTION_BACKEND)(MaskedAttention)
