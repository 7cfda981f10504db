"""Launches of the batch-invariant attention at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

import torch

from ddtree.kernels.lineage.triton import lineage_pooled_triton
from ddtree.kernels.tree_attention.triton_invariant import tree_attention_invariant_triton

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def attention(heads, kv_heads, head_dim, num_rows, dtype):
    """A launch of one sequence."""

    def launch() -> None:
        slots, starts, lengths = (torch.zeros(size, dtype=torch.int32) for size in (1, 2, 4))
        pages = [torch.empty(8, 64, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        table, rows = torch.zeros(4, 2048, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int32)
        lineage = lineage_pooled_triton(rows, rows, rows, 16)
        query = torch.empty(num_rows, heads, head_dim, dtype=dtype)
        tree_attention_invariant_triton(query, *pages, table, slots, starts, lengths, rows, rows, lineage, 0.1, num_rows)

    return launch


def launches():
    for num_rows in (1, 65):
        yield f"27B, {num_rows} rows", attention(24, 4, 256, num_rows, BFLOAT16)
        yield f"8B, {num_rows} rows", attention(32, 8, 128, num_rows, BFLOAT16)
        yield f"SmolLM2, {num_rows} rows", attention(9, 3, 64, num_rows, BFLOAT16)
    yield "SmolLM2, fp32", attention(9, 3, 64, 64, FLOAT32)
    yield "fp32, head dim 128", attention(32, 8, 128, 64, FLOAT32)
    yield "fp32, head dim 256", attention(24, 4, 256, 64, FLOAT32)
