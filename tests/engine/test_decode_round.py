"""The lossless property as a unit test: whatever the drafter does, the output is the target's own."""

import pytest
import torch

from ddtree.engine.request import Request
from ddtree.sampling.choose import choose
from ddtree.sampling.noise import gumbel_noise, noise_key
from ddtree.sampling.params import SamplingParams
from tests.scripted import EOS, VOCAB, ScriptedTarget, logits_after, scripted_engine

BUDGETS = [0, 1, 2, 3, 7, 8, 15, 16, 32, 40, 64, 128, 256, 512, 1024]
PROMPT = (3, 0, 5)


def alone(request: Request) -> list[int]:
    """What the target writes by itself, from the law alone: no engine, no tree."""
    key = noise_key(request.seed, request.choice_index, request.prompt_token_ids)
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        noise = None
        if not request.sampling.greedy:
            noise = gumbel_noise(key, [len(tokens)], VOCAB, torch.device("cpu"))
        tokens.append(int(choose(torch.from_numpy(logits_after(tokens))[None], request.sampling, noise)[0]))
        if tokens[-1] in request.eos_token_ids | request.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_equals_plain_decoding(budget, skill, temperature):
    sampling = SamplingParams(temperature=temperature, top_p=0.95 if temperature else 1.0)
    request = Request(PROMPT, 40, sampling, seed=11, tree_budget=budget)
    emission = scripted_engine(skill).generate(request)
    assert list(emission.token_ids) == alone(request)
    assert emission.finish_reason == "length"
    assert 0 in emission.token_ids or temperature  # token id 0 is a token like any other


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_any_block_size(block_size):
    request = Request(PROMPT, 25, tree_budget=20)
    assert list(scripted_engine(0.7, block_size=block_size).generate(request).token_ids) == alone(request)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", [{"skill": 0.0}, {"skill": 1.0}, {"skill": 0.5, "eos_everywhere": True}])
def test_eos_ends_generation_inside_an_accepted_run(budget, options):
    request = Request(PROMPT, 60, tree_budget=budget, eos_token_ids=frozenset({EOS}))
    emission = scripted_engine(**options).generate(request)
    assert list(emission.token_ids) == alone(request)
    assert emission.token_ids[-1] == EOS and emission.finish_reason == "stop" and emission.stop_reason == EOS


@pytest.mark.parametrize("budget", [0, 1, 16, 64, 1024])
@pytest.mark.parametrize("options", [{"skill": 0.0}, {"skill": 1.0}, {"skill": 0.5, "eos_everywhere": True}])
def test_forged_stop_and_cap(budget, options):
    """For every k: stop at the first occurrence of g[k]; for every cap: exactly g[:cap]."""
    full = alone(Request(PROMPT, 30))
    for k, token_id in enumerate(full):
        request = Request(PROMPT, 30, tree_budget=budget, stop_token_ids=frozenset({token_id}))
        emission = scripted_engine(**options).generate(request)
        assert list(emission.token_ids) == full[: full.index(token_id) + 1]
        assert (emission.finish_reason, emission.stop_reason) == ("stop", token_id)
        capped = scripted_engine(**options).generate(Request(PROMPT, k + 1, tree_budget=budget))
        assert list(capped.token_ids) == full[: k + 1]
        assert capped.finish_reason == "length" and capped.stop_reason is None


@pytest.mark.parametrize("budget", [0, 16])
def test_stop_at_the_cap_is_a_stop(budget):
    full = alone(Request(PROMPT, 30))
    k = next(i for i in range(10, 30) if full[i] not in full[:i])
    request = Request(PROMPT, k + 1, tree_budget=budget, stop_token_ids=frozenset({full[k]}))
    assert scripted_engine(1.0).generate(request).finish_reason == "stop"
    request = Request(PROMPT, k, tree_budget=budget, stop_token_ids=frozenset({full[k]}))
    assert scripted_engine(1.0).generate(request).finish_reason == "length"


@pytest.mark.parametrize("budget", [0, 1, 16, 64])
@pytest.mark.parametrize("skill", [0.0, 0.6, 1.0])
def test_counts_agree(budget, skill):
    request = Request(PROMPT, 60, tree_budget=budget, eos_token_ids=frozenset({EOS}))
    emission = scripted_engine(skill).generate(request)
    stats = emission.stats
    emitted = sum(length * count for length, count in stats.acceptance_histogram.items())
    assert stats.output_tokens == len(emission.token_ids) == 1 + emitted - stats.trimmed_tokens
    assert sum(stats.acceptance_histogram.values()) == stats.decode_rounds
    assert stats.mode == ("ddtree" if budget else "target_only")
    if budget == 0:
        assert set(stats.acceptance_histogram) <= {1} and stats.nodes_verified == 0
    if skill == 1.0 and budget >= 8:
        assert stats.mean_acceptance_length > 3


def test_prefill_in_any_chunking():
    prompt = tuple(i % VOCAB for i in range(17))
    expected = alone(Request(prompt, 20))
    for chunk in (1, 2, 16, 17, 18):
        engine = scripted_engine(0.5, prefill_chunk=chunk)
        assert list(engine.generate(Request(prompt, 20, tree_budget=8)).token_ids) == expected


def test_without_a_drafter_the_mode_says_so():
    emission = scripted_engine(None).generate(Request(PROMPT, 10, tree_budget=16))
    assert list(emission.token_ids) == alone(Request(PROMPT, 10))
    assert emission.stats.mode == "target_only" and "no drafter" in emission.stats.reason


def test_side_by_side_equals_alone():
    requests = [
        Request((i, 0, 2), 10 + 3 * i, SamplingParams(temperature=0.7 * (i % 2)), seed=i, tree_budget=[0, 4, 16, 64][i % 4])
        for i in range(8)
    ]
    engine = scripted_engine(0.6, max_running=8)
    ids = {engine.add(request): request for request in requests}
    output = {request_id: [] for request_id in ids}
    while engine.has_work:
        for emission in engine.step():
            output[emission.request_id].extend(emission.token_ids)
    for request_id, request in ids.items():
        assert output[request_id] == alone(request)


def test_abort_then_go_on():
    engine = scripted_engine(0.5)
    first = engine.add(Request(PROMPT, 50, tree_budget=8))
    for _ in range(4):
        engine.step()
    engine.abort(first)
    assert not engine.has_work
    request = Request(PROMPT, 20, tree_budget=8)
    assert list(engine.generate(request).token_ids) == alone(request)


def test_a_fault_takes_only_its_request():
    engine = scripted_engine(0.5, target=ScriptedTarget(fail_at=3))
    engine.add(Request(PROMPT, 50, tree_budget=8))
    emissions = []
    while engine.has_work:
        emissions += engine.step()
    assert emissions[-1].finish_reason == "error" and "scripted fault" in emissions[-1].error
    request = Request(PROMPT, 20, tree_budget=8)
    assert list(engine.generate(request).token_ids) == alone(request)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request((), 5), "at least one token"),
        (Request((VOCAB,), 5), "prompt_token_ids must lie in"),
        (Request((-1,), 5), "prompt_token_ids must lie in"),
        (Request((1,), 0), "max_tokens must be >= 1"),
        (Request((1,), 5, tree_budget=-1), "tree_budget must be >= 0, got -1"),
        (Request((1,) * 500, 50), "exceed the context of 512"),
    ],
)
def test_bad_requests_are_refused_before_they_run(request_, words):
    engine = scripted_engine(0.5)
    with pytest.raises(ValueError, match=words):
        engine.add(request_)
    assert not engine.has_work
