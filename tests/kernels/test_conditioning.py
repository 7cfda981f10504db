"""Conditioned scores of all pairs: the twin against the adapter itself along paths, the kernels against the twin."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ddtree.kernels.conditioning import (
    AdapterWeights,
    PathScores,
    transitions_pooled,
    transitions_pooled_reference,
)
from ddtree.models.adapter import PAIRWISE, Adapter, AdapterConfig
from ddtree.models.conditioning import Conditioning, conditioned
from tests.closeness import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of sums in another order, of rounded operands


def adapter_weights(vocab: int, size: int, rank: int, dtype=torch.float32, num_ancestors: int = 1) -> AdapterWeights:
    each = ((size, size), (size,), (rank + 2, size), (rank + 2,))
    shapes = ((num_ancestors, vocab, size), (vocab, rank), *((num_ancestors, *shape) for shape in each))
    drawn = [torch.randn(shape) * (shape[-1] ** -0.5 if place > 1 else 0.7) for place, shape in enumerate(shapes)]
    drawn[1] *= rank**-0.5
    return AdapterWeights(*(tensor.to(DEVICE, dtype) for tensor in drawn))


def block(sequences: int, depths: int, width: int, size: int, vocab: int, dtype=torch.float32, num_ancestors: int = 1) -> tuple[torch.Tensor, ...]:
    """Places, roots, candidates, the drafter's own scores, what it ranks with, strengths."""
    ids = torch.stack([torch.randperm(vocab)[:width] for _ in range(sequences * depths)]).view(sequences, depths, width)
    own, ranking = ((torch.randn(sequences, depths, vocab) * 3).log_softmax(dim=-1).gather(2, ids) for _ in range(2))
    rows = (
        torch.randn(num_ancestors, sequences, depths, size).to(dtype),
        torch.randint(0, vocab, (sequences,)),
        ids,
        own,
        ranking,
        torch.linspace(1.0, 2.5, sequences),
    )
    return tuple(tensor.to(DEVICE) for tensor in rows)


def tables(scores) -> dict[str, torch.Tensor]:
    """What `transitions_pooled` returned, by name."""
    return {"scores": scores} if isinstance(scores, torch.Tensor) else scores._asdict()


def assert_same(found, expected, error: float) -> None:
    found, expected = (t if isinstance(t, dict) else tables(t) for t in (found, expected))
    assert found.keys() == expected.keys()
    for name, table in found.items():
        assert_close(name, table, expected[name], error)


def by_kernel(*rows):
    pytest.importorskip("triton")
    from ddtree.kernels.conditioning.triton import transitions_pooled_triton

    return transitions_pooled_triton(*rows)


class Borrowed:
    """A target of which only embedding and head are wanted."""

    def __init__(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        self.embed_tokens = embedding
        self.lm_head = type("Head", (), {"weight": head})
        self.config = type("Config", (), {"vocab_size": len(head)})

    def embed(self, token_ids):
        return self.embed_tokens[token_ids]


@pytest.mark.parametrize("summary", PAIRWISE)
def test_the_twin_says_what_the_adapter_says_along_paths(summary):
    sequences, depths, width, vocab, channels = 2, 5, 7, 40, 24
    adapter = Adapter(AdapterConfig(channels, depths + 1, width=32, rank=20, summary=summary))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(0.0, 0.3)
    embedding, head = torch.randn(2, vocab, channels)
    slots = torch.randn(sequences, depths + 1, channels)
    _, roots, ids, own, ranking, strengths = (t.cpu() for t in block(sequences, depths, width, 1, vocab))
    bound = Conditioning(adapter, Borrowed(embedding, head), tables=True)
    with torch.no_grad():
        scores = bound.transitions(slots, roots, ids, own, ranking, strengths)
        for _ in range(6):
            ranks = torch.randint(0, width, (sequences, depths))
            path = ids.gather(2, ranks[..., None])[..., 0]
            tokens = torch.cat([roots[:, None], path], dim=1)
            corrections = adapter(slots, tokens, embedding, head, ids, own) * strengths[:, None, None]
            expected = conditioned(ranking, corrections)[..., :-1]
            above = torch.cat([torch.zeros(sequences, 2, dtype=torch.int64), ranks], dim=1)
            for b, k in itertools.product(range(sequences), range(depths)):
                if summary == "grandparent":
                    one = PathScores(*(table[b : b + 1] for table in scores))
                    found = one.rows(k + 1, above[b, k : k + 1], above[b, k + 1 : k + 2])[0, 0]
                else:
                    found = scores[b, k, above[b, k + 1]]
                assert_close("scores along a path", found, expected[b, k], 1e-5)


@pytest.mark.parametrize("num_ancestors", [1, 2])
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
def test_the_kernels_agree_with_the_twin(sequences, depths, width, size, rank, dtype, num_ancestors):
    weights = adapter_weights(100, size, rank, dtype, num_ancestors)
    rows = block(sequences, depths, width, size, 100, dtype, num_ancestors)
    wide = AdapterWeights(*(tensor.double() for tensor in weights))
    expected = transitions_pooled_reference(rows[0].double(), *rows[1:], wide)
    found = by_kernel(*rows, weights)
    assert_same(found, expected, ERROR[dtype])
    if num_ancestors == 2:
        assert not found.below_grandparent[:, 0].any()
        one = transitions_pooled_reference(rows[0][:1].double(), *rows[1:], parents_alone(wide))
        first = found.below_parent[:, 0] - found.norms[:, 0, 0][..., None]
        assert_close("depth 1, without grandparents", first, one[:, 0], ERROR[dtype])


def parents_alone(weights: AdapterWeights) -> AdapterWeights:
    return AdapterWeights(*(tensor if name == "candidate_table" else tensor[:1] for name, tensor in weights._asdict().items()))


@pytest.mark.parametrize("way", ["twin", "kernels"])
def test_pairs_are_normalised_with_everything_else_whatever_is_excluded(way):
    weights, rows = adapter_weights(60, 64, 16, num_ancestors=2), block(2, 3, 9, 64, 60, num_ancestors=2)
    rows[4][0, 1, 4:] = -torch.inf
    rows[4][1, 0] = -torch.inf  # a depth without candidates
    scores = (by_kernel if way == "kernels" else transitions_pooled_reference)(*rows, weights)
    everything = torch.arange(9, device=DEVICE)
    for depth in (1, 2, 3):
        for grandparent in everything:
            found = scores.rows(depth, grandparent.expand(9), everything)
            assert not found.isnan().any() and (found <= 0).all()
            out = (rows[4][:, depth - 1] == -torch.inf)[:, None].expand_as(found)
            assert torch.equal(found == -torch.inf, out) and (found.exp().sum(-1) < 1 + 1e-5).all()


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
@pytest.mark.parametrize("num_ancestors", [1, 2])
def test_rows_do_not_see_each_other_and_nothing_is_left_unwritten(monkeypatch, num_ancestors):
    """Another sequence's NaN stays in it; outputs begin as NaN."""
    weights, rows = adapter_weights(60, 64, 16, num_ancestors=num_ancestors), block(2, 3, 5, 64, 60, num_ancestors=num_ancestors)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(math.nan))
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, math.nan))
    expected = tables(by_kernel(*rows, weights))
    assert all(table.isfinite().all() for table in expected.values())
    rows[0][:, 1] = math.nan
    found = tables(by_kernel(*rows, weights))
    assert all(torch.equal(found[name][0], table[0]) for name, table in expected.items())


@pytest.mark.parametrize("num_ancestors", [1, 2])
def test_a_sequence_gets_what_it_gets_alone(num_ancestors):
    weights, rows = adapter_weights(80, 128, 48, num_ancestors=num_ancestors), block(3, 4, 12, 128, 80, num_ancestors=num_ancestors)
    together = tables(by_kernel(*rows, weights))
    for b in range(3):
        one = (rows[0][:, b : b + 1].contiguous(), *(tensor[b : b + 1].contiguous() for tensor in rows[1:]))
        alone = tables(by_kernel(*one, weights))
        assert_same({name: table[b : b + 1] for name, table in together.items()}, alone, 1e-6)


def test_bad_input_is_named():
    weights, rows = adapter_weights(30, 64, 16), block(1, 3, 5, 64, 30)
    for place, wrong, message in (
        (0, rows[0][..., :32], r"places must be \[1, 1, 3, 64\]"),
        (0, rows[0].bfloat16(), r"places must be .* torch.float32"),
        (1, rows[1].int(), "root_tokens must be"),
        (4, rows[4][:, :2], r"ranking must be \[1, 3, 5\]"),
        (5, rows[5].double(), "strengths must be"),
    ):
        with pytest.raises(ValueError, match=message):
            transitions_pooled(*rows[:place], wrong, *rows[place + 1 :], weights)
    with pytest.raises(ValueError, match=r"out_weights must be \[1, 18, 64\]"):
        transitions_pooled(*rows, weights._replace(out_weights=weights.out_weights[:, :16]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("size", "rank"), [(512, 256), (128, 64), (1024, 512), (320, 96)])
@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("num_ancestors", [1, 2])
def test_true_shapes_on_the_device(sequences, size, rank, dtype, num_ancestors):
    weights = adapter_weights(5000, size, rank, dtype, num_ancestors)
    rows = block(sequences, 15, 64, size, 5000, dtype, num_ancestors)
    wide = AdapterWeights(*(tensor.double() for tensor in weights))
    expected = transitions_pooled_reference(rows[0].double(), *rows[1:], wide)
    assert_same(transitions_pooled(*rows, weights), expected, ERROR[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("num_ancestors", [1, 2])
def test_a_captured_launch_follows_its_inputs(num_ancestors):
    weights = adapter_weights(5000, 512, 256, torch.bfloat16, num_ancestors)
    rows = block(2, 15, 64, 512, 5000, torch.bfloat16, num_ancestors)
    transitions_pooled(*rows, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = transitions_pooled(*rows, weights)
    for tensor, fresh in zip(rows, block(2, 15, 64, 512, 5000, torch.bfloat16, num_ancestors), strict=True):
        tensor.copy_(fresh)
    graph.replay()
    again = tables(transitions_pooled(*rows, weights))
    assert all(torch.equal(table, again[name]) for name, table in tables(out).items())
