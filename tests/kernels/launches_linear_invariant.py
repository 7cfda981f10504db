"""Launches of the batch-invariant linear kernel at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

import torch

from ddtree.kernels.linear.plan import plan_invariant
from ddtree.kernels.linear.triton_invariant import invariant_linear_triton


def linear(num_rows, num_columns, width, swiglu=False, residual=False, dtype=torch.bfloat16):
    def launch() -> None:
        weight = torch.empty(1, width, dtype=dtype).expand(num_columns, width)
        x = torch.empty(num_rows, width, dtype=dtype)
        out = torch.empty(num_rows, num_columns // 2 if swiglu else num_columns, dtype=dtype)
        added = out if residual else None
        invariant_linear_triton(x, weight, None, swiglu, added, out, plan_invariant(weight, swiglu))

    return launch


def launches():
    for num_rows in (1, 65):
        yield f"gate and up, {num_rows} rows", linear(num_rows, 34_816, 5_120, True)
        yield f"query, key, value, {num_rows} rows", linear(num_rows, 14_336, 5_120)
        yield f"down, {num_rows} rows", linear(num_rows, 5_120, 17_408, residual=True)
        yield f"small gate and up, {num_rows} rows", linear(num_rows, 3_072, 576, True)
        yield f"small down, {num_rows} rows", linear(num_rows, 576, 1_536, residual=True)
    yield "fp32", linear(16, 3_072, 576, True, dtype=torch.float32)
    yield "fp16", linear(16, 960, 576, dtype=torch.float16)
