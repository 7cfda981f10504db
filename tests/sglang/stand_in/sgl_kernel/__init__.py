"""What SGLang's scheduler wants of `sgl_kernel` on a CPU, for tests on machines for which no build of it is published."""

from __future__ import annotations

import ctypes


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Each request's new slots, in order, into its row of `req_to_token` from its start to its end."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc, *sizes):
    """Rows `src_loc` to `tgt_loc` in every buffer, by address and row size in bytes; all read before any is written."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for start, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(start + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(start + target * stride, row, stride)


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in here")

    return absent
