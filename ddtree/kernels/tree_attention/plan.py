"""How the attention kernel is cut into programs: tile sizes by shape, and into how many splits the keys go.

Chosen by shape alone, never by a value on the device. Every row of the tables keeps a program's shared memory below
99 KB, the most that sm_86, sm_89 and sm_120 have (tests/kernels/test_triton_compiles.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

MOST_SPLITS = 32
PROGRAMS_PER_SM = 2

# Pairs of the largest sequence up to which a row of the table holds -> (pairs, keys) of a tile, warps, stages.
_HALF_TABLES = {
    64: ((256, (16, 64, 4, 3)), (1024, (64, 32, 4, 3)), (None, (128, 64, 8, 3))),
    128: ((16, (16, 64, 4, 3)), (32, (32, 64, 4, 3)), (None, (64, 64, 4, 2))),
    256: ((16, (16, 32, 4, 3)), (32, (32, 32, 4, 3)), (None, (64, 32, 4, 2))),
}
_FLOAT_TABLES = {
    64: ((16, (16, 32, 4, 1)), (None, (32, 32, 8, 1))),
    128: ((16, (16, 32, 4, 1)), (None, (32, 32, 8, 1))),
    256: ((16, (16, 16, 4, 1)), (None, (32, 32, 8, 1))),
}


@dataclass(frozen=True)
class AttentionPlan:
    """Tile sizes and launch options of one shape."""

    block_m: int  # pairs (row, head of the group) of a tile
    block_t: int  # keys of a tile, all in one page; of pages of one token, in as many
    num_warps: int
    num_stages: int
    num_splits: int
    least_share: int  # key tiles that a split takes at least

    def workspace_size(self, num_packed: int, num_heads: int, head_dim: int) -> int:
        """float32 elements: each split's output and log of its softmax's total, for every row and head."""
        return self.num_splits * num_packed * num_heads * (head_dim + 1) if self.num_splits > 1 else 0


def plan_attention(
    query: torch.Tensor, num_kv_heads: int, page_size: int, num_sequences: int, max_rows: int
) -> AttentionPlan:
    """The plan for `query` [R, H, D] of B sequences with at most `max_rows` rows each."""
    num_heads, head_dim = query.shape[1:]
    num_pairs = max_rows * num_heads // num_kv_heads
    tables = _FLOAT_TABLES if query.dtype == torch.float32 else _HALF_TABLES
    table = next((rows for width, rows in tables.items() if head_dim <= width), None)
    if table is None:
        raise ValueError(f"head dim {head_dim} has no attention kernel; the largest is {max(tables)}")
    block_m, block_t, num_warps, num_stages = next(row for most, row in table if most is None or num_pairs <= most)
    block_t = min(block_t, page_size) if page_size > 1 else block_t
    num_programs = -(-num_pairs // block_m) * num_kv_heads * num_sequences
    num_splits = max(1, min(MOST_SPLITS, PROGRAMS_PER_SM * num_processors(query.device) // num_programs))
    # A split of fewer keys costs more to combine than it saves.
    least_keys = 64 if block_m == 16 else 128
    return AttentionPlan(block_m, block_t, num_warps, num_stages, num_splits, -(-least_keys // block_t))


def attention_workspace_size(
    query: torch.Tensor, num_kv_heads: int, page_size: int, num_sequences: int, max_rows: int
) -> int:
    """float32 elements that `tree_attention_pooled` needs as `workspace` for these shapes."""
    plan = plan_attention(query, num_kv_heads, page_size, num_sequences, max_rows)
    return plan.workspace_size(*query.shape)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; an H200's number where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
