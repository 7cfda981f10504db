"""Experts' linears: the kernels against the twins, and a row's bits whatever the others take."""

from __future__ import annotations

import pytest
import torch

from ddtree.kernels.experts import add_up, add_up_reference, expert_linear, expert_linear_reference
from tests.closeness import assert_close
from tests.kernels.test_linear import CLOSE, DEVICE

GPU = torch.cuda.is_available()


class Rows:
    """Random rows, each with its own k experts of E, and the weights of both layers."""

    def __init__(self, rows, width, columns, num_experts, each, dtype=torch.float32) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)

        def random(*shape, scale=1.0):
            return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)

        self.x = random(rows, width)
        self.up, self.down = random(num_experts, 2 * columns, width, scale=width**-0.5), random(num_experts, width, columns, scale=columns**-0.5)
        # Skewed: some experts are everybody's, some nobody's.
        skew = torch.linspace(2, 0, num_experts, device=DEVICE)
        self.experts = (torch.rand(rows, num_experts, generator=generator, device=DEVICE) + skew).topk(each).indices
        self.weights = random(rows, each)

    def run(self, linear, sum_up, rows: slice = slice(None)) -> torch.Tensor:
        experts = self.experts[rows]
        inner = linear(self.x[rows], self.up, experts, swiglu=True)
        return sum_up(linear(inner, self.down, experts), self.weights[rows])


def by_kernel(x, weight, experts, swiglu=False) -> torch.Tensor:
    pytest.importorskip("triton")
    from ddtree.kernels.experts.triton import expert_linear_triton

    return expert_linear_triton(x, weight, experts, swiglu)


def add_up_by_kernel(outputs, weights) -> torch.Tensor:
    pytest.importorskip("triton")
    from ddtree.kernels.experts.triton import add_up_triton

    return add_up_triton(outputs, weights)


@pytest.mark.parametrize(("rows", "width", "columns", "num_experts", "each"), [(1, 40, 20, 5, 2), (37, 24, 33, 4, 1), (50, 33, 16, 6, 3)])
def test_the_kernels_compute_what_the_twins_do(rows, width, columns, num_experts, each):
    case = Rows(rows, width, columns, num_experts, each)
    found, expected = case.run(by_kernel, add_up_by_kernel), case.run(expert_linear_reference, add_up_reference)
    assert_close("result", found, expected, CLOSE[torch.float32])


def test_bf16_is_as_close_as_its_rounding():
    case = Rows(9, 64, 32, 4, 2, torch.bfloat16)
    found, expected = case.run(by_kernel, add_up_by_kernel), case.run(expert_linear_reference, add_up_reference)
    assert_close("result", found, expected, CLOSE[torch.bfloat16] * (1 if GPU else 3))  # the interpreter cuts off


def test_each_row_gets_what_it_gets_alone():
    case = Rows(9, 24, 16, 5, 2)
    together = case.run(expert_linear, add_up)
    for row in range(9):
        assert torch.equal(case.run(expert_linear, add_up, slice(row, row + 1)), together[row : row + 1])


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(2, 5), torch.zeros(3, 4, 6), r"x must be \[R, K\] and weight \[E, N, K\], got \[2, 5\] and \[3, 4, 6\]"),
        (torch.zeros(3, 6), torch.zeros(3, 4, 6), "a row for each of 2 rows or 4 pairs, got 3"),
        (torch.zeros(2, 6), torch.zeros(3, 4, 6).half(), "weight must be contiguous and of x's dtype torch.float32"),
    ],
)
def test_bad_input_is_named(x, weight, message):
    with pytest.raises(ValueError, match=message):
        expert_linear(x, weight, torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_row_has_the_same_bits_whatever_the_others_take_on_a_gpu():
    """Qwen3-30B-A3B's experts."""
    case = Rows(513, 2_048, 768, 128, 8, torch.bfloat16)
    whole = case.run(expert_linear, add_up)
    assert_close("result", whole[:20], case.run(expert_linear_reference, add_up_reference, slice(0, 20)), CLOSE[torch.bfloat16])
    for rows in (1, 7, 64, 65, 300):
        for first in (0, 3, 200):
            assert torch.equal(case.run(expert_linear, add_up, slice(first, first + rows)), whole[first : first + rows])
