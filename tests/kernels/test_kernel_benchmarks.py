"""The benchmarks of kernels call them as they are: what runs without a GPU of their own checks, in Triton's interpreter."""

from __future__ import annotations

import pytest

from benchmarks.kernels import causal_conv, fused


@pytest.mark.parametrize(("kernel", "sequences"), [("tree", 2), ("step", 2), ("prefill", 1), ("prefill", 2)])
def test_the_convolutions_benchmark_checks_its_kernels(kernel, sequences):
    rows = 1 if kernel == "step" else 9
    assert causal_conv.check(kernel, rows, sequences, 0, 40, 3) <= causal_conv.LIMIT


@pytest.mark.parametrize("step", sorted(fused.STEPS))
def test_the_small_steps_benchmark_checks_its_kernels(step):
    fused.check(step, fused.Inputs(3, 0, small=8))
