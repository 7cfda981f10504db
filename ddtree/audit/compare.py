"""How far two computations of the same thing may be apart, and which rows are further.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

# Relative to the rows' mean norm: between one forward and another of other shape, over all layers.
TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
# A row that a token outside its path moves has moved by more than nothing; this only absolves rounding.
MOVED = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
NEAR_TIE_FP32 = 1e-4  # logits; fp32 paths that differ by more are not the same computation


def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, 5e-4)


def moved(dtype: torch.dtype) -> float:
    return MOVED.get(dtype, 1e-6)


def row_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[R] float64: the norm of each row's difference, over the mean norm of the expected rows; inf for NaN."""
    actual = actual.detach().double().flatten(1)
    expected = expected.detach().double().flatten(1)
    scale = expected.norm(dim=1).mean().clamp_min(1e-12)
    return ((actual - expected).norm(dim=1) / scale).nan_to_num(nan=torch.inf)


def closest_row(row: torch.Tensor, candidates: torch.Tensor, limit: float) -> int | None:
    """Index of the candidate [R, ..] that equals `row`, within `limit`; None if none does."""
    errors = row_errors(row.unsqueeze(0).expand_as(candidates), candidates)
    best = int(errors.argmin())
    return best if float(errors[best]) <= limit else None
