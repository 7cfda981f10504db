"""Which tiles a linear layer of few rows is computed in, by its shape.

Letters: R rows, N output rows of the weight (2F with swiglu), K input width. `python -m benchmarks.kernels.linear
--sweep` measures the candidates on a card and prints `TUNED` anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BUCKETS = (1, 16, 32, 64, 128)  # rows; one kernel serves all R of a bucket alike
MOST_ROWS = 1  # of shapes that are not in TUNED; beyond, cuBLAS was faster (docs/log.md)
MOST_ROWS_FP32 = 16
INVARIANT_PROGRAMS = 160  # that parts of K may make of a layer's tiles, for a tile of rows
LEAST_PART = 1024  # of K


class Plan(NamedTuple):
    """A program makes `block_n` output columns (with swiglu from as many gates and as many ups), `block_k` of K at once."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_parts: int = 1  # of K; more than one takes a second launch that adds them up
    norm_first: bool = False  # in a launch of its own: many rows make it dear to repeat in every program


# (bucket, N, K, swiglu): plan, or None where cuBLAS was faster. Of bf16 and fp16.
TUNED: dict[tuple[int, int, int, bool], Plan | None] = {}


def plan_of(num_rows: int, weight: torch.Tensor, swiglu: bool) -> Plan | None:
    """The plan for `num_rows` rows times `weight` [N, K]; None means cuBLAS."""
    bucket = bucket_of(num_rows)
    if bucket is None:
        return None
    shape = (bucket, *weight.shape, swiglu)
    if weight.dtype == torch.float32:
        return untuned(*shape, bytes_each=4) if num_rows <= MOST_ROWS_FP32 else None
    if shape in TUNED:
        return TUNED[shape]
    return untuned(*shape) if num_rows <= MOST_ROWS else None


def bucket_of(num_rows: int) -> int | None:
    """The least bucket that holds `num_rows`; None beyond the last."""
    return next((bucket for bucket in BUCKETS if num_rows <= bucket), None)


def untuned(bucket: int, num_columns: int, width: int, swiglu: bool, bytes_each: int = 2) -> Plan:
    """A plan that is good on no card in particular and fits into 99 KB of shared memory."""
    if bucket == 1:
        # block_k is a multiple of what the warps read at once, 16 bytes a thread, or they would have to meet over each
        # part of the input. Small layers are read in one go.
        block_k = 2048 if 1024 < width <= 2048 else 1024
        num_warps = block_k // 512 if width <= 2048 else 4
        block_n = 4 if num_columns >= 4096 else 2
        return Plan(block_n // 2 if swiglu else block_n, block_k * 2 // bytes_each, num_warps, 1)
    if bytes_each == 4:
        return Plan(16, 32, 4, 3)
    if bucket == 16 and num_columns < 8192:  # few programs: each has to have much of its weight under way
        return Plan(16 if width <= 2048 else 32, 256, 4, 4)
    if bucket == 16:
        return Plan(32, 128, 4 if swiglu else 2, 4)
    if bucket == 32:
        return Plan(32 if swiglu or num_columns < 8192 else 64, 128, 4, 3)
    if bucket == 64:
        return Plan(32 if swiglu or num_columns < 8192 else 64, 64, 4, 4)
    return Plan(64, 64, 8, 3)


class InvariantPlan(NamedTuple):
    """Tiles of a layer whose rows have the same bits whatever their number: only `rows` may follow it, and the kernel's
    instructions and the order of its sums do not (`triton_invariant`)."""

    block_n: int
    block_k: int
    num_parts: int
    rows: tuple[tuple[int | None, int, int, int], ...]  # up to so many rows (None: any): rows a tile, warps, stages


def plan_invariant(weight: torch.Tensor, swiglu: bool) -> InvariantPlan:
    """By the weight's shape [N, K] alone."""
    num_columns, width = weight.shape[0] // 2 if swiglu else weight.shape[0], weight.shape[1]
    if weight.dtype == torch.float32:  # fused multiply-adds, one after another along K
        return InvariantPlan(32, 32, 1, ((None, 32, 4, 2),))
    # A warpgroup multiplies 64 rows at once, be they there or not. Twice as many are two warpgroups' work. With a gate there are
    # twice as many tiles: with three stages, three of them have room on a processor, and none is left for a second turn.
    rows = ((64, 64, 4, 3 if swiglu else 4), (None, 128, 8, 3))
    block_n = 64 if swiglu or num_columns < 2048 else 128
    num_tiles = -(-num_columns // block_n)
    # Few columns: parts of K keep the card busy. Their number goes by the shape, so every row is added up in one way.
    num_parts = max(1, min(INVARIANT_PROGRAMS // num_tiles, width // LEAST_PART))
    return InvariantPlan(block_n, 64, num_parts, rows)


def power_of_two(number: int) -> int:
    """The least power of two that is `number` or more."""
    return 1 << max(0, number - 1).bit_length()
