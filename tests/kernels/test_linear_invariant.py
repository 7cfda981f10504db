"""Batch-invariant linear layers: the kernel against the twin, and a row's bits beside any number of others."""

from __future__ import annotations

import pytest
import torch

from ddtree.kernels.linear import fused_linear, fused_linear_reference
from ddtree.kernels.linear.plan import InvariantPlan, plan_invariant
from tests.closeness import assert_close
from tests.kernels.test_linear import CLOSE, Case

SMALL = InvariantPlan(16, 16, 1, ((4, 16, 4, 2), (None, 32, 4, 2)))
IN_PARTS = InvariantPlan(16, 16, 3, ((None, 16, 4, 2),))


def by_kernel(case: Case, plan: InvariantPlan, rows: slice = slice(None)) -> torch.Tensor:
    pytest.importorskip("triton")
    from ddtree.kernels.linear.triton_invariant import invariant_linear_triton

    residual = None if case.residual is None else case.residual[rows]
    return invariant_linear_triton(case.x[rows], case.weight, case.bias, case.swiglu, residual, None, plan)


@pytest.mark.parametrize("plan", [SMALL, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    ("rows", "columns", "width", "steps"),
    [(1, 10, 80, ""), (3, 34, 96, "residual"), (37, 38, 70, "swiglu bias residual"), (20, 18, 50, "bias")],
)
def test_the_kernel_computes_what_the_twin_does(rows, columns, width, steps, plan):
    case = Case(rows, columns, width, steps)
    case.check(by_kernel(case, plan))


@pytest.mark.parametrize("steps", ["plain swiglu", "zero_centred bias residual"])
def test_the_public_function_gives_each_row_what_it_gets_alone(steps):
    case = Case(9, 48, 32, steps)
    given = {"bias": case.bias, "norm": case.norm, "swiglu": case.swiglu, "batch_invariant": True}
    together = fused_linear(case.x, case.weight, residual=case.residual, out=case.out, **given)
    assert together.data_ptr() == case.storage.data_ptr() and case.storage[9].isnan().all()
    case.check(together)
    for row in range(9):
        own = slice(row, row + 1)
        residual = None if case.residual is None else case.residual[own]
        assert torch.equal(fused_linear(case.x[own], case.weight, residual=residual, **given), together[own])


def test_the_residual_is_added_in_place():
    case = Case(5, 20, 64, "residual")
    expected = case.reference()
    found = fused_linear(case.x, case.weight, residual=case.residual, out=case.residual, batch_invariant=True)
    assert found is case.residual
    assert_close("result", found, expected, CLOSE[torch.float32])


def test_nan_stays_in_its_row():
    case = Case(7, 20, 64, "residual")
    before = by_kernel(case, SMALL)
    case.x[[0, 6]] = torch.nan
    assert torch.equal(by_kernel(case, SMALL)[1:6], before[1:6])


def test_plans_go_by_the_weight_alone():
    tall, wide = (torch.empty(1, width, dtype=torch.bfloat16).expand(rows, width) for rows, width in ((34_816, 5_120), (5_120, 17_408)))
    assert plan_invariant(tall, True).num_parts == 1
    assert plan_invariant(wide, False).num_parts > 1
    assert plan_invariant(wide, False) == plan_invariant(wide.clone(), False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("columns", "width", "steps", "dtype"),
    [
        (16_480, 5_120, "zero_centred", torch.bfloat16),
        (34_816, 5_120, "zero_centred swiglu", torch.bfloat16),
        (5_120, 17_408, "residual", torch.bfloat16),
        (6_144, 4_096, "plain bias", torch.bfloat16),
        (576, 1_536, "residual", torch.bfloat16),
        (577, 1_000, "plain bias residual", torch.bfloat16),
        (49_152, 576, "", torch.bfloat16),
        (3_072, 576, "plain swiglu", torch.float16),
        (3_072, 576, "plain swiglu", torch.float32),
        (577, 1_000, "plain bias residual", torch.float32),
    ],
)
def test_a_row_has_the_same_bits_beside_any_number_of_others_on_a_gpu(columns, width, steps, dtype):
    """Alone and at any place among 7, 64, 65, 128, 512 and 1,025 rows, some of them NaN."""
    case = Case(1025, columns, width, steps, dtype)
    given = {"bias": case.bias, "norm": case.norm, "swiglu": case.swiglu}

    def run(rows: slice) -> torch.Tensor:
        residual = None if case.residual is None else case.residual[rows]
        return fused_linear(case.x[rows], case.weight, residual=residual, batch_invariant=True, **given)

    whole = run(slice(0, 1025))
    assert_close("result", whole, fused_linear_reference(case.x, case.weight, residual=case.residual, **given), CLOSE[dtype])
    for rows in (1, 2, 7, 16, 63, 64, 65, 128, 129, 512):
        for first in (0, 1, 64, 300):
            part = slice(first, first + rows)
            assert torch.equal(run(part), whole[part]), f"{rows} rows from {first} on"
    case.x[1::2] = torch.nan
    assert torch.equal(run(slice(0, 200))[::2], whole[:200:2])


