"""Launches of the linear kernels at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

import torch

from ddtree.kernels.linear.plan import TUNED, Plan, untuned
from ddtree.kernels.linear.triton import fused_linear_triton


def linear(num_rows, num_columns, width, swiglu=False, norm=None, residual=False, dtype=torch.bfloat16, plan=None):
    def launch() -> None:
        weight = torch.empty(1, width, dtype=dtype).expand(num_columns, width)
        x = torch.empty(num_rows, width, dtype=dtype)
        out = torch.empty(num_rows, num_columns // 2 if swiglu else num_columns, dtype=dtype)
        scale = torch.float32 if norm == "zero_centred" else dtype
        normed = None if norm is None else (torch.empty(width, dtype=scale), 1e-6, norm)
        bucket = next(b for b in (1, 16, 32, 64, 128) if num_rows <= b)
        chosen = plan or untuned(bucket, num_columns, width, swiglu, x.element_size())
        added = out if residual else None
        fused_linear_triton(x, weight, None, normed, swiglu, added, out, chosen)

    return launch


def launches():
    for num_rows in (1, 16, 32, 64, 128):
        yield f"gate and up, {num_rows} rows", linear(num_rows, 34_816, 5_120, True, "zero_centred")
        yield f"query, key, value, {num_rows} rows", linear(num_rows, 14_336, 5_120, False, "plain")
        yield f"down, {num_rows} rows", linear(num_rows, 5_120, 17_408, residual=True)
        yield f"small gate and up, {num_rows} rows", linear(num_rows, 3_072, 576, True, "plain")
        yield f"small down, {num_rows} rows", linear(num_rows, 576, 1_536, residual=True)
    yield "parts", linear(16, 5_120, 17_408, residual=True, plan=Plan(64, 128, 4, 4, 3))
    yield "parts with norm and gate", linear(16, 3_072, 576, True, "plain", plan=Plan(16, 64, 4, 3, 3))
    for num_rows in (1, 16):
        yield f"fp32, {num_rows} rows", linear(num_rows, 3_072, 576, True, "plain", dtype=torch.float32)
    yield "fp16, 16 rows", linear(16, 960, 576, dtype=torch.float16)
    for (bucket, num_columns, width, swiglu), plan in TUNED.items():
        if plan is not None:
            norm = "plain" if swiglu else None
            yield f"tuned {bucket} {num_columns} {width}", linear(bucket, num_columns, width, swiglu, norm, plan=plan)
