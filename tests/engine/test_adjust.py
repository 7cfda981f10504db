"""Penalties, bias, min_tokens and log-probabilities: the same at every budget, and what a plain loop computes."""

import math

import numpy as np
import pytest
import torch

from ddtree.engine.request import Request
from ddtree.sampling.adjust import LogitAdjuster
from ddtree.sampling.choose import choose
from ddtree.sampling.noise import gumbel_noise, noise_key
from ddtree.sampling.params import SamplingParams
from tests.scripted import EOS, VOCAB, logits_after, scripted_engine

PROMPT = (3, 0, 5, 3)
BUDGETS = [0, 1, 16, 64, 1024]
DRAFTERS = [{"skill": 1.0}, {"skill": 0.0}, {"skill": 0.5, "eos_everywhere": True}]
FIELDS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.75},
    "negative frequency": {"frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": ((0, -100.0), (4, 3.5))},
    "min_tokens": {"min_tokens": 17},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((2, 1.5), (EOS, 4.0)),
        "min_tokens": 12,
    },
}


def adjusted_by_hand(prefix, request) -> np.ndarray:
    """The law with the request's changes, token by token from their definitions."""
    params, emitted = request.sampling, prefix[len(request.prompt_token_ids) :]
    logits = logits_after(prefix)
    for token in range(VOCAB):
        if token in prefix:
            factor = np.float32(params.repetition_penalty)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= np.float32(emitted.count(token) * np.float32(params.frequency_penalty))
        logits[token] -= np.float32(params.presence_penalty * (token in emitted))
        logits[token] += np.float32(dict(params.logit_bias).get(token, 0))
    if len(emitted) < params.min_tokens:
        for token in request.eos_token_ids | request.stop_token_ids:
            logits[token] = -math.inf
    return logits


def alone(request: Request) -> list[int]:
    key = noise_key(request.seed, request.choice_index, request.prompt_token_ids)
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        noise = None if request.sampling.greedy else gumbel_noise(key, [len(tokens)], VOCAB)
        logits = torch.from_numpy(adjusted_by_hand(tokens, request))[None]
        tokens.append(int(choose(logits, request.sampling, noise)[0]))
        if tokens[-1] in request.eos_token_ids | request.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_budget_writes_what_a_plain_loop_writes(fields, temperature):
    sampling = SamplingParams(temperature=temperature, **fields)
    options = {"seed": 3, "eos_token_ids": frozenset({EOS}), "stop_token_ids": frozenset({9})}
    expected = alone(Request(PROMPT, 24, sampling, **options))
    for budget in BUDGETS:
        for drafter in DRAFTERS[: 1 if budget == 1024 else 3]:
            emission = scripted_engine(**drafter).generate(Request(PROMPT, 24, sampling, tree_budget=budget, **options))
            assert list(emission.token_ids) == expected, (budget, drafter)
            if budget >= 16 and drafter == {"skill": 1.0} and len(expected) > 8:
                assert emission.stats.mean_acceptance_length > 2


def test_min_tokens_is_reached_and_then_lifted():
    plain = alone(Request(PROMPT, 60, eos_token_ids=frozenset({EOS})))
    assert len(plain) < 40
    sampling = SamplingParams(min_tokens=40)
    emission = scripted_engine(1.0).generate(
        Request(PROMPT, 200, sampling, tree_budget=16, eos_token_ids=frozenset({EOS}))
    )
    assert len(emission.token_ids) >= 41 and emission.token_ids.index(EOS) >= 40


@pytest.mark.parametrize("num_top", [0, 3, VOCAB])
@pytest.mark.parametrize("budget", BUDGETS)
def test_logprobs_are_the_targets_own_at_each_emitted_token(budget, num_top):
    sampling = SamplingParams(temperature=0.9, presence_penalty=1.0, logit_bias=((1, 5.0),))
    request = Request(PROMPT, 30, sampling, seed=4, tree_budget=budget, num_logprobs=num_top)
    emission = scripted_engine(0.7).generate(request)
    assert len(emission.logprobs) == len(emission.token_ids)
    prefix = list(PROMPT)
    for token_id, found in zip(emission.token_ids, emission.logprobs, strict=True):
        law = torch.from_numpy(logits_after(prefix)).log_softmax(-1)
        assert found.token_id == token_id and found.logprob == pytest.approx(float(law[token_id]), abs=1e-5)
        best = law.argsort(descending=True)[:num_top].tolist()
        assert [each for each, _ in found.top] == best
        prefix.append(token_id)


def test_logprobs_are_cut_where_the_tokens_are():
    full = scripted_engine(1.0).generate(Request(PROMPT, 30)).token_ids
    request = Request(PROMPT, 30, tree_budget=64, stop_token_ids=frozenset({full[10]}), num_logprobs=1)
    emission = scripted_engine(1.0).generate(request)
    assert len(emission.logprobs) == len(emission.token_ids) <= 11


def test_a_trees_rows_equal_plain_rows_bit_by_bit():
    """Random trees, a vocabulary that no vector width divides: each row against the same history without a tree."""
    generator, vocab_size = np.random.default_rng(0), 1003
    params = SamplingParams(
        presence_penalty=0.37, frequency_penalty=0.21, repetition_penalty=1.13, logit_bias=((5, 0.7), (1002, -3.3))
    )
    emitted = generator.integers(0, 40, 25).tolist()
    device = torch.device("cpu")
    for num_nodes in (1, 2, 17, 65, 300):
        token_ids = generator.integers(0, 40, num_nodes)
        token_ids[0] = emitted[-1]
        parents = np.array([-1] + [generator.integers(0, i) for i in range(1, num_nodes)])
        logits = torch.randn(num_nodes, vocab_size) * 5
        adjuster = LogitAdjuster(params, (1, 2, 1000), (), vocab_size, device)
        adjuster.follow([1, 2, 1000, *emitted])
        rows = adjuster(logits, token_ids, parents)
        for node in range(num_nodes):
            path, above = [], node
            while above > 0:
                path.append(int(token_ids[above]))
                above = parents[above]
            plain = LogitAdjuster(params, (1, 2, 1000), (), vocab_size, device)
            plain.follow([1, 2, 1000, *emitted, *reversed(path)])
            assert torch.equal(
                plain(logits[node : node + 1], token_ids[node : node + 1], np.array([-1]))[0], rows[node]
            )


def test_a_bias_outside_the_vocabulary_is_refused():
    engine = scripted_engine(0.5)
    with pytest.raises(ValueError, match="logit_bias: token ids lie in 0 ... 12, got 13"):
        engine.add(Request(PROMPT, 5, SamplingParams(logit_bias=((13, 1.0),))))
