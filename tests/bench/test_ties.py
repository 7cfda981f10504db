"""A near tie is what the target itself hardly decides; a wrong token is not one."""

import torch

from ddtree.bench.ties import near_tie
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from tests.bench.fakes import tiny_llama

BEFORE = tuple(range(12)) * 2


def best_two(model):
    from ddtree.bench.ties import _scores

    logits, _ = _scores(model, Request(BEFORE, 4), BEFORE, 0)
    return tuple(logits.topk(2).indices.tolist())


def test_a_wrong_token_is_no_tie():
    model = tiny_llama()
    assert near_tie(model, Request(BEFORE, 4), BEFORE, best_two(model)) is None
    sampled = Request(BEFORE, 4, sampling=SamplingParams(temperature=1.0))
    assert near_tie(model, sampled, BEFORE, (0, 1)) is None


def test_twin_rows_of_the_head_are_a_tie():
    model = tiny_llama(tied=False)
    best, other = best_two(model)
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[best] * (1 + 1e-7)
    tie = near_tie(model, Request(BEFORE, 4), BEFORE, (best, other))
    assert tie is not None and tie["margin"] <= 1e-4 and tie["noise"] < 1e-4
    third = next(token for token in range(13) if token not in (best, other))
    assert near_tie(model, Request(BEFORE, 4), BEFORE, (best, third)) is None, (
        "a tie of others excuses nothing"
    )
