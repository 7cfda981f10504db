"""Norm, rotation and cache write in one step: the twin against the models' layers, the kernel against the twin."""

from types import SimpleNamespace

import pytest
import torch

from ddtree.kernels.qk_rotary import qk_rotary_pooled, qk_rotary_pooled_reference
from ddtree.models.layers import RotaryEmbedding, rms_norm, rotate, zero_centred_norm
from tests.closeness import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
# The interpreter cuts bfloat16 off instead of rounding.
RATIO = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3 if DEVICE == "cuda" else 2e-2}
KINDS = (None, "plain", "zero_centred")


def by_kernel(*arguments) -> torch.Tensor:
    pytest.importorskip("triton")
    from ddtree.kernels.qk_rotary.triton import qk_rotary_pooled_triton

    return qk_rotary_pooled_triton(*arguments)


def inputs(kind, dtype, heads=3, kv_heads=1, head_dim=16, rotary_dim=16, extra=3, factor=1.0, page_size=16) -> SimpleNamespace:
    """Two sequences in slots 2 and 0 behind 30 and 5 tokens, two padding rows full of NaN."""
    rows = [(2, i) for i in range(4)] + [(0, i) for i in range(3)] + [(-1, 10**6)] * 2
    lengths = torch.tensor([5, 10**6, 30], dtype=torch.int32)
    rotary = torch.rand(rotary_dim // 2)
    sign = torch.ones(rotary_dim)
    sign[: rotary_dim // 2] = -1
    projected = torch.randn(len(rows), heads + 2 * kv_heads + extra, head_dim)
    projected[-2:] = torch.nan
    scale = None if kind is None else torch.rand(heads + kv_heads, head_dim) + 0.5
    pages = [torch.full((8, page_size, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    positions = [int(lengths[slot]) + index // 2 if slot >= 0 else 10**6 for slot, index in rows]

    def integers(values):
        return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)

    return SimpleNamespace(
        heads=projected.to(DEVICE, dtype),
        positions=integers(positions),
        frequencies=torch.cat((rotary, rotary)).to(DEVICE),
        sign=sign.to(DEVICE),
        attention_factor=factor,
        scale=None if scale is None else scale.to(DEVICE, torch.float32 if kind == "zero_centred" else dtype),
        kind=kind,
        eps=EPS,
        key_pages=pages[0],
        value_pages=pages[1],
        page_table=integers([[4, 1, 6], [2, 2, 2], [7, 3, 5]]),
        row_slots=integers([slot for slot, _ in rows]),
        row_indices=integers([index for _, index in rows]),
        context_lengths=integers(lengths),
        query_out=torch.full((len(rows), heads, head_dim), torch.nan, dtype=dtype, device=DEVICE),
    )


def copied(given: SimpleNamespace) -> SimpleNamespace:
    changed = {name: getattr(given, name).clone() for name in ("key_pages", "value_pages", "query_out")}
    return SimpleNamespace(**(vars(given) | changed))


def check_kernel(given: SimpleNamespace) -> None:
    expected, actual = copied(given), copied(given)
    qk_rotary_pooled_reference(*vars(expected).values())
    assert by_kernel(*vars(actual).values()) is actual.query_out
    for name in ("key_pages", "value_pages", "query_out"):
        now, then = getattr(actual, name), getattr(expected, name)
        assert torch.equal(now.isnan(), then.isnan()), f"{name}: written elsewhere"
        assert_close(name, now.nan_to_num(), then.nan_to_num(), RATIO[now.dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary_dim, factor", [(16, 1.0), (8, 1.3)])
def test_the_twin_does_as_the_layers_do(kind, rotary_dim, factor):
    given = inputs(kind, torch.float32, rotary_dim=rotary_dim, factor=factor)
    rotary = RotaryEmbedding.__new__(RotaryEmbedding)
    torch.nn.Module.__init__(rotary)
    rotary.frequencies, rotary.sign, rotary.attention_factor = given.frequencies, given.sign, factor
    query = qk_rotary_pooled(*vars(given).values())
    turned = given.heads[:7, :4]
    if kind is not None:
        turned = (rms_norm if kind == "plain" else zero_centred_norm)(turned, given.scale, EPS)
    turned = rotate(turned, rotary(given.positions[:7], torch.float32))
    assert torch.equal(query[:7], turned[:, :3])
    assert query[7:].isnan().all()
    # Slot 2 goes on at token 30, in its second page and from token 32 on in its third; slot 0 at token 5 of its first.
    places = [(3, 14), (3, 15), (5, 0), (5, 1), (4, 5), (4, 6), (4, 7)]
    for row, (page, token) in enumerate(places):
        assert torch.equal(given.key_pages[page, token], turned[row, 3:])
        assert torch.equal(given.value_pages[page, token], given.heads[row, 4:5])
    assert (~given.key_pages.isnan()).sum() == 7 * 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_does_as_the_twin_does(kind, dtype):
    check_kernel(inputs(kind, dtype, rotary_dim=8, factor=1.3))


def test_awkward_heads_and_long_positions():
    given = inputs("plain", torch.float32, heads=5, kv_heads=2, head_dim=24, rotary_dim=24, extra=0)
    given.positions += 90_000
    check_kernel(given)


def test_keys_and_values_alone():
    check_kernel(inputs("plain", torch.float32, heads=0, kv_heads=2, extra=0))


def test_rows_of_a_wider_matrix():
    given = inputs("zero_centred", torch.float32)
    wide = torch.full((given.heads.shape[0], given.heads[0].numel() + 7), torch.nan, device=DEVICE)
    wide[:, :-7] = given.heads.flatten(1)
    given.heads = wide[:, :-7].view(given.heads.shape)
    check_kernel(given)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "centred"}, "kind must be None"),
        ({"kind": None}, "scale and kind go together"),
        ({"scale": torch.ones(2, 16)}, r"scale must be \[4, 16\]"),
        ({"heads": torch.ones(9, 4, 16)}, "5 heads of dim 16 are needed"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    given = SimpleNamespace(**(vars(inputs("plain", torch.float32)) | change))
    with pytest.raises(ValueError, match=message):
        qk_rotary_pooled(*vars(given).values())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(24, 4, 256, 64), (32, 8, 128, 128), (9, 3, 64, 64), (0, 8, 128, 128)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_true_shapes_on_the_device(shape, kind, dtype):
    heads, kv_heads, head_dim, rotary_dim = shape
    check_kernel(inputs(kind, dtype, heads, kv_heads, head_dim, rotary_dim, page_size=64))
