"""The best tokens of every row: the twin, torch.topk over unique keys, and the Triton kernels."""

import numpy as np
import pytest
import torch

from ddtree.kernels.sample import streams_pooled
from ddtree.kernels.tree_build import top_candidates_pooled, top_candidates_reference, top_candidates_topk
from ddtree.sampling.choose import rank_scores
from ddtree.sampling.noise import gumbel_noise, noise_key
from ddtree.sampling.params import SamplingParams
from ddtree.tree.build import top_candidates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("twin", "topk", "triton")


def best_by(way: str):
    if way != "triton":
        return {"twin": top_candidates_reference, "topk": top_candidates_topk}[way]
    pytest.importorskip("triton")
    from ddtree.kernels.top_tokens.triton import top_tokens_triton

    return lambda logits, num: top_tokens_triton(logits, num)[:2]


def check_best(way: str, logits: torch.Tensor, num: int) -> None:
    """Ids in the order of the host's ranking; bf16 logits are far apart or equal, so rounding changes nothing."""
    ids, log_probs = best_by(way)(logits.to(DEVICE), num)
    assert (ids.dtype, log_probs.dtype) == (torch.int64, torch.float32)
    every = logits.float().cpu().log_softmax(dim=-1)
    expected = top_candidates(every.numpy(), num)
    np.testing.assert_array_equal(ids.cpu().numpy(), expected.token_ids)
    np.testing.assert_allclose(log_probs.cpu().numpy(), expected.log_probs, rtol=1e-5, atol=2e-6)


def bf16_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).bfloat16()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num", "vocab_size"), [(1, 1), (1, 700), (5, 5), (40, 3000), (100, 2500)])
def test_best_first_and_ties_to_the_lowest_id(way, num, vocab_size):
    check_best(way, bf16_logits(2, vocab_size), num)


@pytest.mark.parametrize("way", WAYS)
def test_more_equal_tokens_than_there_is_room_for(way):
    logits = bf16_logits(2, 1200)
    logits[0, 100:] = 2.0  # the cut goes through more than a thousand equals
    logits[1, ::2] = -0.0  # and zero has two signs
    logits[1, 1::2] = 0.0
    check_best(way, logits, 70)


@pytest.mark.parametrize("way", WAYS)
def test_good_tokens_in_few_groups_are_all_found(way):
    logits = torch.full((1, 5000), -30.0)
    logits[0, 7::2048] = torch.arange(3.0)  # two interleaved groups of the kernel's hold the best
    logits[0, 9::2048] = torch.arange(3.0)
    check_best(way, logits, 9)


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_drawn_comes_last_with_no_probability(way):
    logits = bf16_logits(4, 1500)
    logits[0] = -torch.inf
    logits[1] = torch.nan  # padding
    logits[2, 3:] = -torch.inf
    logits[3, :1400] = torch.nan
    ids, log_probs = (t.cpu() for t in best_by(way)(logits.to(DEVICE), 20))
    finite = log_probs > -torch.inf
    assert finite.sum(dim=1).tolist() == [0, 0, 3, 20]
    assert (ids[~finite] == 0).all() and not log_probs.isnan().any()
    assert sorted(ids[2, :3].tolist()) == [0, 1, 2] and (ids[3] >= 1400).all()
    assert abs(float(log_probs[2, :3].exp().sum()) - 1) < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_rows_need_not_lie_together(way):
    wide = bf16_logits(3, 2100)
    check_best(way, wide[:, :2000], 9)
    check_best(way, wide[::2], 9)


@pytest.mark.parametrize("way", WAYS)
def test_certainty_is_never_more_than_certain(way):
    logits = torch.full((4, 150), -20.0)
    logits[:, 0] = torch.tensor([0.0, -7.0, -10.0, 30.0])
    log_probs = best_by(way)(logits.to(DEVICE), 2)[1]
    assert (log_probs <= 0).all() and float(log_probs[3, 0]) == 0


def test_the_requests_noise_ranks_where_the_temperature_is_above_zero():
    key = noise_key(11, 0, [0, 5])
    logits = bf16_logits(3, 800).to(DEVICE)
    signed = key - (1 << 64) if key >> 63 else key
    streams = streams_pooled(torch.full((3,), signed, device=DEVICE), torch.arange(40, 43, device=DEVICE))
    temperatures = torch.tensor([0.7, 0.0, 0.7], device=DEVICE)
    _, log_probs = top_candidates_pooled(logits, 30, temperatures=temperatures, streams=streams)
    noise = gumbel_noise(key, [40, 41, 42], 800)
    drawn = rank_scores(logits.cpu(), SamplingParams(temperature=0.7), noise)
    greedy = rank_scores(logits.cpu(), SamplingParams(), None)
    for row, scores in enumerate((drawn, greedy, drawn)):
        expected = scores[row].sort(descending=True).values[:30]
        np.testing.assert_allclose(log_probs[row].cpu(), expected, atol=1e-4)


@pytest.mark.parametrize("num", [0, 9, 1025])
def test_too_many_and_too_few_are_named(num):
    with pytest.raises(ValueError, match=f"num must be 1 to .*, got {num}"):
        top_candidates_pooled(torch.zeros(1, 8 if num < 10 else 2000), num)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 15, 64, 128, 255, 1000, 1024])
@pytest.mark.parametrize("way", ["topk", "triton"])
@pytest.mark.parametrize("vocab_size", [49_152, 151_936, 248_320])
def test_true_shapes_on_the_device(way, num, vocab_size):
    logits = bf16_logits(15, vocab_size)
    logits[3] = 1.0
    logits[4, 0] = 60.0  # token id 0, all but certain
    check_best(way, logits, num)
