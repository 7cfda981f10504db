"""Launches of the batch-invariant linear kernels at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

import torch

from ddtree.kernels.experts.triton import add_up_triton, expert_linear_triton
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


def experts(num_rows, width, columns, num_experts, each):
    def launch() -> None:
        taken = torch.zeros(num_rows, each, dtype=torch.int64)
        up, down = (torch.empty(1, *shape, dtype=torch.bfloat16).expand(num_experts, *shape) for shape in ((2 * columns, width), (width, columns)))
        x = torch.empty(num_rows, width, dtype=torch.bfloat16)
        inner = expert_linear_triton(x, up, taken, True)
        add_up_triton(expert_linear_triton(inner, down, taken, False), torch.empty(num_rows, each, dtype=torch.bfloat16))

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
    yield "experts", experts(65, 2_048, 768, 128, 8)
