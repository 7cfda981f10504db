"""The fused steps: the twins against the models' modules, the kernels against the twins."""

import pytest
import torch
import torch.nn.functional as F

from ddtree.kernels import fused
from ddtree.models import layers
from ddtree.models.gated_delta_net import GatedDeltaNet
from tests.closeness import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16)
# The interpreter cuts bfloat16 off instead of rounding.
RATIO = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3 if DEVICE == "cuda" else 2e-2}
EPS = 1e-6


def kernel(name: str):
    pytest.importorskip("triton")
    from ddtree.kernels.fused import triton

    return getattr(triton, f"{name}_triton")


def rows(*shape: int, dtype=torch.float32) -> torch.Tensor:
    """Random rows that lie in a wider matrix full of NaN."""
    wide = torch.full((shape[0], shape[1] * (shape[2] if len(shape) > 2 else 1) + 5), torch.nan, dtype=dtype)
    wide[:, :-5] = torch.randn(shape[0], wide.shape[1] - 5)
    return wide.to(DEVICE)[:, :-5].unflatten(1, shape[1:]) if len(shape) > 2 else wide.to(DEVICE)[:, :-5]


def same(name: str, *arguments) -> None:
    expected = getattr(fused, f"{name}_reference")(*arguments)
    actual = kernel(name)(*arguments)
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    assert_close(name, actual, expected, RATIO[actual.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twins_are_the_modules(dtype):
    hidden, weight = rows(4, 24, dtype=dtype), torch.rand(24, dtype=dtype, device=DEVICE)
    assert torch.equal(fused.rms_norm_reference(hidden, weight, EPS, "plain"), layers.rms_norm(hidden, weight, EPS))
    scale = torch.rand(24, device=DEVICE)
    expected = layers.zero_centred_norm(hidden, scale, EPS)
    assert torch.equal(fused.rms_norm_reference(hidden, scale, EPS, "zero_centred"), expected)
    assert torch.equal(fused.swiglu_reference(hidden), F.silu(hidden[:, :12]) * hidden[:, 12:])
    values, gate = rows(4, 3, 8, dtype=dtype), rows(4, 3, 8, dtype=dtype)
    assert torch.equal(fused.gate_heads_reference(values, gate), values * gate.sigmoid())
    layer = GatedDeltaNet.__new__(GatedDeltaNet)
    torch.nn.Module.__init__(layer)
    layer.norm, layer.eps = scale[:8], EPS
    expected = layer._norm_and_gate(values, gate)
    assert torch.equal(fused.norm_and_gate_reference(values, gate, scale[:8], EPS), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "zero_centred"])
@pytest.mark.parametrize("width", [1, 96, 257])
def test_rms_norm(kind, width, dtype):
    same("rms_norm", rows(3, width, dtype=dtype), torch.rand(width, dtype=dtype, device=DEVICE), EPS, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 64, 2600])
def test_swiglu(width, dtype):
    same("swiglu", rows(3, width, dtype=dtype) * 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(3, 24), (5, 256)])
def test_gates(heads, dim, dtype):
    values, gate = rows(2, heads, dim, dtype=dtype), rows(2, heads, dim, dtype=dtype) * 4
    same("gate_heads", values.contiguous(), gate)
    same("norm_and_gate", values, gate, torch.rand(dim, device=DEVICE), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_padding_row_spoils_only_itself(dtype):
    hidden = rows(3, 32, dtype=dtype)
    hidden[1] = torch.nan
    for actual in (
        kernel("rms_norm")(hidden, torch.ones(32, dtype=dtype, device=DEVICE), EPS, "plain"),
        kernel("swiglu")(hidden),
    ):
        assert actual[[0, 2]].isfinite().all()


@pytest.mark.parametrize("pick", [fused.argmax, fused.argmax_reference, lambda logits: kernel("argmax")(logits)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 8192, 20_001])
def test_argmax_gives_the_lowest_id_of_the_largest(pick, dtype, width):
    logits = rows(5, width, dtype=dtype)
    logits[0] = logits[0].clamp(max=0.5)  # many ties
    logits[1] = -torch.inf
    logits[2, -1] = 100.0
    logits[3] = torch.nan
    logits[4, 0] = torch.nan
    chosen = pick(logits)
    assert chosen.dtype == torch.int64
    lowest = int((logits[0] == logits[0].max()).nonzero()[0])
    rest = int(logits[4, 1:].float().argmax()) + 1 if width > 1 else 0
    assert chosen.tolist() == [lowest, 0, width - 1, 0, rest]


def test_no_rows_at_all():
    for name, *arguments in (
        ("rms_norm", torch.ones(8, device=DEVICE), EPS, "plain"),
        ("swiglu",),
        ("argmax",),
    ):
        assert kernel(name)(torch.empty(0, 8, device=DEVICE), *arguments).shape[0] == 0


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fused.rms_norm(torch.ones(1, 4), torch.ones(4), EPS, "centred"), 'kind must be "plain"'),
        (lambda: fused.swiglu(torch.ones(1, 3)), "even number of columns wide, got 3"),
        (lambda: fused.gate_heads(torch.ones(1, 2, 3), torch.ones(1, 2, 4)), r"\[1, 2, 3\], got \[1, 2, 4\]"),
        (lambda: kernel("swiglu")(torch.ones(4, 6).t()), "contiguous in its last dimension"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 65, 2048])
def test_true_shapes_on_the_device(num_rows, dtype):
    for width in (576, 5120):
        hidden = rows(num_rows, width, dtype=dtype)
        for kind, weight_dtype in (("plain", dtype), ("zero_centred", torch.float32)):
            same("rms_norm", hidden, torch.rand(width, dtype=weight_dtype, device=DEVICE), EPS, kind)
    same("swiglu", rows(num_rows, 2 * 17408, dtype=dtype))
    same("gate_heads", rows(num_rows, 24, 256, dtype=dtype).contiguous(), rows(num_rows, 24, 256, dtype=dtype))
    values, gate = rows(num_rows, 48, 128, dtype=dtype), rows(num_rows, 48, 128, dtype=dtype)
    same("norm_and_gate", values, gate, torch.rand(128, device=DEVICE), EPS)
    logits = rows(min(num_rows, 130), 248_320, dtype=dtype)
    assert torch.equal(kernel("argmax")(logits), fused.argmax_reference(logits))
