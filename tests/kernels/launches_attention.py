"""Launches of the attention kernels at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

import torch

from ddtree.kernels.tree_attention.commit_triton import commit_pages_triton
from ddtree.kernels.tree_attention.triton import tree_attention_pooled_triton

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def attention(heads, kv_heads, head_dim, num_rows, dtype, **kwargs):
    """A launch of one sequence; `tree` in kwargs: under a mask; `page_size` likewise."""
    tree, page_size = kwargs.pop("tree", False), kwargs.pop("page_size", 64)

    def launch() -> None:
        indices = [torch.zeros(size, dtype=torch.int32) for size in (1, 2, 4)]
        pages = [torch.empty(8, page_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        table = torch.zeros(4, 16, dtype=torch.int32)
        mask = torch.zeros(num_rows, num_rows, dtype=torch.uint8) if tree else None
        query = torch.empty(num_rows, heads, head_dim, dtype=dtype)
        tree_attention_pooled_triton(query, *pages, table, *indices, mask, 0.1, num_rows, **kwargs)

    return launch


def commit():
    pages = [torch.empty(2, 8, 64, 4, 256, dtype=BFLOAT16) for _ in range(2)]
    table, indices = torch.zeros(4, 16, dtype=torch.int32), [torch.zeros(size, dtype=torch.int32) for size in (1, 4)]
    path = torch.zeros(1, 16, dtype=torch.int32)
    commit_pages_triton(*pages, table, *indices, path, torch.zeros(1, dtype=torch.int32))


def launches():
    for num_rows in (1, 4, 64, 1025):
        yield f"27B tree of {num_rows}", attention(24, 4, 256, num_rows, BFLOAT16, tree=True)
    yield "27B prefill", attention(24, 4, 256, 2048, BFLOAT16)
    yield "drafter block", attention(32, 8, 128, 16, BFLOAT16, bidirectional=True, window=2048)
    yield "drafter block over slots", attention(32, 8, 128, 16, BFLOAT16, bidirectional=True, page_size=1)
    yield "fp32 drafter block over slots", attention(9, 3, 64, 16, FLOAT32, bidirectional=True, page_size=1)
    yield "8B tree of 4", attention(32, 8, 128, 4, BFLOAT16, tree=True)
    yield "8B tree of 1025", attention(32, 8, 128, 1025, BFLOAT16, tree=True)
    yield "8B prefill", attention(32, 8, 128, 2048, BFLOAT16)
    yield "SmolLM2 tree of 64", attention(9, 3, 64, 64, BFLOAT16, tree=True)
    yield "SmolLM2 tree of 128", attention(9, 3, 64, 128, BFLOAT16, tree=True)
    yield "SmolLM2 prefill", attention(9, 3, 64, 2048, BFLOAT16)
    yield "SmolLM2 fp32 tree of 64", attention(9, 3, 64, 64, FLOAT32, tree=True)
    yield "fp32 tree of 64, head dim 128", attention(32, 8, 128, 64, FLOAT32, tree=True)
    yield "fp32 tree of 64, head dim 256", attention(24, 4, 256, 64, FLOAT32, tree=True)
    yield "commit", commit
