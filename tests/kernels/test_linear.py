"""Linear layers of few rows, with what stands around them: the kernels and the cuBLAS path against the twin."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from ddtree.kernels.linear import Norm, fused_linear, fused_linear_reference, plan
from ddtree.kernels.linear.dispatch import fused_linear_cublas, fused_linear_cuda, fused_linear_planned
from ddtree.kernels.linear.plan import Plan, bucket_of, plan_of, untuned
from tests.closeness import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Case:
    """Random arguments of one call; `out` is poisoned and has a row more than R in its storage."""

    def __init__(self, rows, columns, width, steps="", dtype=torch.float32, device=DEVICE, seed=0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape, scale=1.0, dtype=dtype):
            return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

        steps = steps.split()
        self.rows, self.swiglu = rows, "swiglu" in steps
        outputs = columns // 2 if self.swiglu else columns
        self.x, self.weight = random(rows, width), random(columns, width, scale=width**-0.5)
        self.bias = random(columns) if "bias" in steps else None
        self.residual = random(rows, outputs) if "residual" in steps else None
        self.norm = None
        if "plain" in steps:
            self.norm = Norm(random(width), 1e-6, "plain")
        if "zero_centred" in steps:
            self.norm = Norm(1 + random(width, scale=0.3, dtype=torch.float32), 1e-6, "zero_centred")
        self.storage = torch.full((rows + 1, outputs), torch.nan, dtype=dtype, device=device)

    @property
    def out(self) -> torch.Tensor:
        return self.storage[: self.rows]

    def reference(self) -> torch.Tensor:
        steps = {"bias": self.bias, "norm": self.norm, "swiglu": self.swiglu, "residual": self.residual}
        return fused_linear_reference(self.x, self.weight, **steps)

    def run(self, chosen: Plan, out: torch.Tensor | None = None) -> torch.Tensor:
        pytest.importorskip("triton")
        from ddtree.kernels.linear.triton import fused_linear_triton

        out = self.out if out is None else out
        arguments = (self.x, self.weight, self.bias, self.norm, self.swiglu, self.residual, out, chosen)
        return fused_linear_triton(*arguments)

    def check(self, found: torch.Tensor) -> None:
        assert_close("result", found, self.reference(), CLOSE[self.x.dtype])


@pytest.mark.parametrize(
    ("rows", "columns", "width", "steps", "chosen"),
    [
        (1, 10, 80, "", Plan(4, 64, 4, 1)),
        (1, 12, 64, "plain bias residual", Plan(4, 32, 4, 2)),
        (1, 14, 70, "zero_centred swiglu bias residual", Plan(2, 32, 4, 1)),
        (1, 2, 16, "swiglu", Plan(1, 16, 4, 1)),
        (2, 34, 96, "residual", Plan(16, 32, 4, 3)),
        (16, 20, 70, "plain", Plan(16, 32, 4, 3)),
        (5, 38, 64, "zero_centred swiglu bias residual", Plan(16, 32, 4, 3)),
        (33, 18, 50, "plain bias", Plan(16, 32, 4, 3)),
        (3, 20, 100, "residual", Plan(16, 32, 4, 3, 2)),
        (20, 22, 100, "plain swiglu bias residual", Plan(16, 16, 4, 3, 3)),
    ],
)
def test_kernels_compute_what_the_twin_does(rows, columns, width, steps, chosen):
    case = Case(rows, columns, width, steps)
    case.check(case.run(chosen))
    assert case.storage[rows].isnan().all()


@pytest.mark.parametrize(("rows", "chosen"), [(1, Plan(4, 32, 4, 1)), (3, Plan(16, 32, 4, 3)), (3, Plan(16, 32, 4, 3, 2))])
@pytest.mark.parametrize("steps", ["plain swiglu", "zero_centred residual"])
def test_bf16_is_as_close_as_its_rounding(rows, chosen, steps):
    case = Case(rows, 20, 96, steps, torch.bfloat16)
    # The interpreter cuts bf16 off where a GPU rounds to the nearest, so that its errors add up.
    assert_close("result", case.run(chosen), case.reference(), CLOSE[torch.bfloat16] * (1 if DEVICE == "cuda" else 3))


@pytest.mark.parametrize("steps", ["plain swiglu", "residual"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_row_has_the_same_bits_beside_others_and_beside_nan(steps, parts):
    chosen = Plan(16, 32, 4, 3, parts)
    case = Case(13, 20, 64, steps)
    among = case.run(chosen).clone()
    case.x[2:] = torch.nan
    assert torch.equal(case.run(chosen)[:2], among[:2])
    case.x, case.rows = case.x[:2], 2
    case.residual = None if case.residual is None else case.residual[:2]
    assert torch.equal(case.run(chosen), among[:2])


@pytest.mark.parametrize(("rows", "chosen"), [(1, Plan(4, 32, 4, 1)), (4, Plan(16, 32, 4, 3)), (4, Plan(16, 32, 4, 3, 2))])
def test_the_residual_is_added_in_place(rows, chosen):
    case = Case(rows, 20, 64, "plain residual")
    expected = case.reference()
    assert case.run(chosen, out=case.residual) is case.residual
    assert_close("result", case.residual, expected, CLOSE[torch.float32])


def test_strided_rows_and_slices_of_weights_are_read_where_they_lie():
    case = Case(3, 40, 64, "residual")
    wide, tall, kept = torch.full((3, 90), torch.nan), torch.full((60, 80), torch.nan), torch.full((3, 50), torch.nan)
    for name, storage, start in (("x", wide, 10), ("weight", tall, 8), ("residual", kept, 5)):
        tensor = getattr(case, name)
        view = storage.to(DEVICE)[: tensor.shape[0], start : start + tensor.shape[1]]
        setattr(case, name, view.copy_(tensor))
    case.check(case.run(Plan(16, 32, 4, 3)))


@pytest.mark.parametrize("steps", ["", "bias", "residual", "bias residual", "plain swiglu", "swiglu bias residual"])
@pytest.mark.parametrize("given", [True, False], ids=["out", "no out"])
def test_the_way_by_cublas_gives_the_same(steps, given):
    case = Case(5, 24, 64, steps)
    arguments = (case.x, case.weight, case.bias, case.norm, case.swiglu, case.residual)
    out = case.out if given else None
    found = fused_linear_cublas(*arguments, out)
    assert out is None or found.data_ptr() == out.data_ptr()
    case.check(found)


def test_the_twin_is_the_modules_one_after_another():
    case = Case(4, 48, 32, "plain swiglu bias residual", torch.bfloat16)
    normed = F.rms_norm(case.x.float(), (32,), None, 1e-6).bfloat16() * case.norm.weight
    gate, up = F.linear(normed, case.weight, case.bias).chunk(2, dim=-1)
    assert_close("result", case.reference(), F.silu(gate) * up + case.residual, CLOSE[torch.bfloat16])


def test_the_public_function_writes_into_out():
    case = Case(4, 48, 32, "plain swiglu")
    found = fused_linear(case.x, case.weight, norm=case.norm, swiglu=True, out=case.out)
    assert found.data_ptr() == case.storage.data_ptr()
    case.check(case.out)


def test_plans_by_rows_and_shape(monkeypatch):
    weight = torch.empty(24, 16, dtype=torch.bfloat16)
    assert plan_of(2, weight, False) == plan_of(16, weight, False)
    assert plan_of(129, weight, False) is None
    assert plan_of(17, weight.float(), False) is None
    monkeypatch.setattr(plan, "TUNED", {(16, 24, 16, True): Plan(16, 16, 2, 2), (32, 24, 16, False): None})
    assert plan_of(5, weight, True) == Plan(16, 16, 2, 2)
    assert plan_of(20, weight, False) is None
    assert plan_of(5, weight, False) != Plan(16, 16, 2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(6, 5)}, r"x must be \[R, K\] and weight \[N, K\], got \[2, 4\] and \[6, 5\]"),
        ({"weight": torch.zeros(5, 4), "swiglu": True}, "even number of rows, gates first, got 5"),
        ({"weight": torch.zeros(6, 4).half()}, "weight must be of x's dtype torch.float32, got torch.float16"),
        ({"bias": torch.zeros(5)}, r"bias must be \[6\], got \[5\]"),
        ({"norm": (torch.zeros(4), 1e-6, "other")}, 'must be "plain" or "zero_centred", got \'other\''),
        ({"norm": (torch.zeros(5), 1e-6, "plain")}, r"norm weight must be \[4\], got \[5\]"),
        ({"residual": torch.zeros(2, 3)}, r"residual must be \[2, 6\], got \[2, 3\]"),
        ({"out": torch.zeros(6, 2).t()}, "out must be contiguous in its last dimension"),
    ],
)
def test_bad_input_is_named(changes, message):
    arguments = {"x": torch.zeros(2, 4), "weight": torch.zeros(6, 4)} | changes
    with pytest.raises(ValueError, match=message):
        fused_linear(arguments.pop("x"), arguments.pop("weight"), **arguments)


@pytest.mark.long
def test_kernels_compile_for_every_architecture_and_fit_its_shared_memory():
    """99 KB a block is what sm_89 and sm_120 have."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.compiling", "tests.kernels.launches_linear"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    compiled = [json.loads(line) for line in lines]
    assert {facts["sm"] for facts in compiled} == {80, 89, 90, 120}
    assert not [facts for facts in compiled if facts["shared"] > 99 * 1024]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 65, 128, 200])
@pytest.mark.parametrize(
    ("columns", "width", "steps"),
    [
        (16_480, 5_120, "zero_centred"),
        (14_336, 5_120, "zero_centred"),
        (34_816, 5_120, "zero_centred swiglu"),
        (5_120, 17_408, "residual"),
        (5_120, 6_144, "residual"),
        (6_144, 4_096, "plain bias"),
        (3_072, 576, "plain swiglu"),
        (960, 576, "plain"),
        (576, 1_536, "residual"),
        (577, 1_000, "plain bias residual"),
    ],
)
def test_true_shapes_on_a_gpu(columns, width, steps, rows, dtype):
    case = Case(rows, columns, width, steps, dtype)
    given = (case.bias, case.norm, case.swiglu, case.residual, case.out)
    case.check(fused_linear_cuda(case.x, case.weight, *given))
    assert case.storage[rows].isnan().all()
    if rows > 128 or (dtype == torch.float32 and rows > 16):
        return  # cuBLAS in any case
    rule = untuned(bucket_of(rows), columns, width, case.swiglu, case.x.element_size())
    case.storage.fill_(torch.nan)
    found = fused_linear_planned(case.x, case.weight, *given, rule).clone()
    case.check(found)
    assert case.storage[rows].isnan().all()
    case.x[rows // 2 + 1 :] = torch.nan
    again = fused_linear_planned(case.x, case.weight, *given, rule)
    assert torch.equal(again[: rows // 2 + 1], found[: rows // 2 + 1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 16])
def test_a_head_of_more_than_two_gigabytes_on_a_gpu(rows):
    weight = torch.randn(248_320, 5_120, device=DEVICE, dtype=torch.bfloat16) * 5_120**-0.5
    x = torch.randn(rows, 5_120, device=DEVICE, dtype=torch.bfloat16)
    assert_close("logits", fused_linear(x, weight), x @ weight.t(), CLOSE[torch.bfloat16])
