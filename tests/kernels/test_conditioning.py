"""Conditioned scores of all pairs: the twin against the adapter itself along paths, the kernels against the twin."""

from __future__ import annotations

import math

import pytest
import torch

from ddtree.kernels import conditioning
from ddtree.kernels.conditioning import AdapterWeights, transitions_pooled, transitions_pooled_reference
from ddtree.models import adapter as adapters
from ddtree.models.adapter import Adapter, AdapterConfig, conditioned
from tests.closeness import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of sums in another order, of rounded operands


def adapter_weights(vocab: int, size: int, rank: int, dtype=torch.float32) -> AdapterWeights:
    shapes = ((vocab, size), (vocab, rank), (size, size), (size,), (rank + 2, size), (rank + 2,))
    drawn = [torch.randn(shape) * (shape[-1] ** -0.5 if place > 1 else 0.7) for place, shape in enumerate(shapes)]
    drawn[1] *= rank**-0.5
    return AdapterWeights(*(tensor.to(DEVICE, dtype) for tensor in drawn))


def block(sequences: int, depths: int, width: int, size: int, vocab: int, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    """Places, roots, candidates, the drafter's own scores, what it ranks with, strengths."""
    ids = torch.stack([torch.randperm(vocab)[:width] for _ in range(sequences * depths)]).view(sequences, depths, width)
    own, ranking = ((torch.randn(sequences, depths, vocab) * 3).log_softmax(dim=-1).gather(2, ids) for _ in range(2))
    rows = (
        torch.randn(sequences, depths, size).to(dtype),
        torch.randint(0, vocab, (sequences,)),
        ids,
        own,
        ranking,
        torch.linspace(1.0, 2.5, sequences),
    )
    return tuple(tensor.to(DEVICE) for tensor in rows)


def by_kernel(*rows) -> torch.Tensor:
    pytest.importorskip("triton")
    from ddtree.kernels.conditioning.triton import transitions_pooled_triton

    return transitions_pooled_triton(*rows)


def test_the_twin_says_what_the_adapter_says_along_paths():
    sequences, depths, width, vocab, channels = 2, 5, 7, 40, 24
    adapter = Adapter(AdapterConfig(channels, depths + 1, width=32, rank=20))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(0.0, 0.3)
    embedding, head = torch.randn(2, vocab, channels)
    slots = torch.randn(sequences, depths + 1, channels)
    _, roots, ids, own, ranking, strengths = (t.cpu() for t in block(sequences, depths, width, 1, vocab))
    weights = AdapterWeights(
        adapter.parent_token(embedding),
        adapter.candidate_token(head),
        adapter.mix.weight,
        adapter.mix.bias,
        adapter.out.weight,
        adapter.out.bias,
    )
    with torch.no_grad():
        places = adapter.places(slots, embedding[roots])
        table = transitions_pooled(places, roots, ids, own, ranking, strengths, weights)
        for _ in range(6):
            ranks = torch.randint(0, width, (sequences, depths))
            path = ids.gather(2, ranks[..., None])[..., 0]
            tokens = torch.cat([roots[:, None], path], dim=1)
            corrections = adapter(slots, tokens, embedding, head, ids, own) * strengths[:, None, None]
            expected = conditioned(ranking, corrections)[..., :-1]
            rows = torch.cat([torch.zeros(sequences, 1, dtype=torch.int64), ranks[:, :-1]], dim=1)
            found = table.gather(2, rows[..., None, None].expand(-1, -1, 1, width))[:, :, 0]
            assert_close("scores along a path", found, expected, 1e-5)
    assert conditioning.LEAST_REST == adapters.LEAST_REST and conditioning.LEAST_LOG_PROB == adapters.LEAST_LOG_PROB


@pytest.mark.parametrize(
    ("sequences", "depths", "width", "size", "rank", "dtype"),
    [
        (2, 3, 7, 64, 24, torch.float32),
        (1, 2, 64, 128, 64, torch.float32),
        (3, 1, 1, 64, 33, torch.float32),
        (1, 4, 16, 192, 200, torch.bfloat16),
        (2, 2, 33, 64, 64, torch.bfloat16),
    ],
)
def test_the_kernels_agree_with_the_twin(sequences, depths, width, size, rank, dtype):
    weights = adapter_weights(100, size, rank, dtype)
    rows = block(sequences, depths, width, size, 100, dtype)
    wide = AdapterWeights(*(tensor.double() for tensor in weights))
    expected = transitions_pooled_reference(rows[0].double(), *rows[1:], wide)
    assert_close("scores", by_kernel(*rows, weights), expected, ERROR[dtype])


@pytest.mark.parametrize("way", ["twin", "kernels"])
def test_an_excluded_candidate_stays_excluded_and_spoils_nothing(way):
    weights, rows = adapter_weights(60, 64, 16), block(2, 3, 9, 64, 60)
    build = by_kernel if way == "kernels" else transitions_pooled_reference
    for excluded in (rows[3], rows[4]):
        excluded[0, 1, 4:] = excluded[1, 2, ::2] = -torch.inf
    rows[4][1, 0] = -torch.inf  # a depth without candidates
    rows[4][0, 2, 0] = 0.0  # as good as certain
    rows[4][0, 2, 1:] = -torch.inf
    table = build(*rows, weights)
    out = rows[4] == -torch.inf
    assert not table.isnan().any() and (table <= 0).all()
    assert torch.equal(table == -torch.inf, out[:, :, None].expand_as(table))
    assert_close("what is left", table.exp(), transitions_pooled_reference(*rows, weights).exp(), 1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's, of a maximum
def test_rows_do_not_see_each_other_and_nothing_is_left_unwritten(monkeypatch):
    """Another sequence's NaN stays in it; outputs begin as NaN."""
    weights, rows = adapter_weights(60, 64, 16), block(2, 3, 5, 64, 60)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(math.nan))
    expected = by_kernel(*rows, weights)
    assert expected.isfinite().all()
    rows[0][1] = math.nan
    assert torch.equal(by_kernel(*rows, weights)[0], expected[0])


def test_a_sequence_gets_what_it_gets_alone():
    weights, rows = adapter_weights(80, 128, 48), block(3, 4, 12, 128, 80)
    together = by_kernel(*rows, weights)
    for b in range(3):
        alone = by_kernel(*(tensor[b : b + 1].contiguous() for tensor in rows), weights)
        assert_close("scores", together[b : b + 1], alone, 1e-6)


def test_bad_input_is_named():
    weights, rows = adapter_weights(30, 64, 16), block(1, 3, 5, 64, 30)
    for place, wrong, message in (
        (0, rows[0][..., :32], r"places must be \[1, 3, 64\]"),
        (0, rows[0].bfloat16(), r"places must be .* torch.float32"),
        (1, rows[1].int(), "root_tokens must be"),
        (4, rows[4][:, :2], r"ranking must be \[1, 3, 5\]"),
        (5, rows[5].double(), "strengths must be"),
    ):
        with pytest.raises(ValueError, match=message):
            transitions_pooled(*rows[:place], wrong, *rows[place + 1 :], weights)
    with pytest.raises(ValueError, match=r"out_weight must be \[18, 64\]"):
        transitions_pooled(*rows, weights._replace(out_weight=weights.out_weight[:16]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("size", "rank"), [(512, 256), (128, 64), (1024, 512), (320, 96)])
@pytest.mark.parametrize("sequences", [1, 8])
def test_true_shapes_on_the_device(sequences, size, rank, dtype):
    weights, rows = adapter_weights(5000, size, rank, dtype), block(sequences, 15, 64, size, 5000, dtype)
    wide = AdapterWeights(*(tensor.double() for tensor in weights))
    expected = transitions_pooled_reference(rows[0].double(), *rows[1:], wide)
    assert_close("scores", transitions_pooled(*rows, weights), expected, ERROR[dtype])


@pytest.mark.gpu
def test_a_captured_launch_follows_its_inputs():
    weights, rows = adapter_weights(5000, 512, 256, torch.bfloat16), block(2, 15, 64, 512, 5000, torch.bfloat16)
    transitions_pooled(*rows, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = transitions_pooled(*rows, weights)
    for tensor, fresh in zip(rows, block(2, 15, 64, 512, 5000, torch.bfloat16), strict=True):
        tensor.copy_(fresh)
    graph.replay()
    assert torch.equal(out, transitions_pooled(*rows, weights))
