"""Rounds over pools emit what rounds over per-sequence caches emit: whole on the device, or with the host in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddtree.doctor.hybrid import VOCAB, random_hybrid
from ddtree.engine.config import EngineConfig
from ddtree.engine.device_auto import DeviceAuto
from ddtree.engine.device_round import RoundShape
from ddtree.engine.measure import start_auto
from ddtree.engine.pooled import pooled_engine
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams

BUDGETS = (0, 1, 2, 7, 15, 16, 32, 64, 128)
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8)
FILTERED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40)
RECOMMENDED = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, min_p=0.02)  # as models' cards have it


@pytest.fixture(scope="module", name="engines")
def _engines():
    """One over per-sequence caches, one over pools; the same weights."""
    plain = random_hybrid("cpu", torch.float32)
    config = EngineConfig(max_context=512, max_tree_budget=128, prefill_chunk=24, max_running=3)
    return plain, pooled_engine(plain.target.model, plain.drafter.model, config, max_rows=512)


def request(seed: int, budget: int, sampling: SamplingParams = GREEDY, max_tokens: int = 24, **more) -> Request:
    prompt = torch.randint(0, VOCAB, (5 + 13 * seed,), generator=torch.Generator().manual_seed(seed))
    return Request(tuple(prompt.tolist()), max_tokens, sampling, seed=seed, tree_budget=budget, **more)


def run_together(engine, requests) -> list[tuple[int, ...]]:
    """All at once; the tokens of each."""
    ids = [engine.add(each) for each in requests]
    tokens = {request_id: [] for request_id in ids}
    while engine.has_work:
        for emission in engine.step():
            assert emission.error is None, emission.error
            tokens[emission.request_id] += emission.token_ids
    return [tuple(tokens[request_id]) for request_id in ids]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, pytest.param(FILTERED, marks=pytest.mark.long), RECOMMENDED], ids=["greedy", "sampled", "filtered", "recommended"]
)
def test_every_budget_emits_the_same_with_nothing_between_on_the_host(engines, sampling, monkeypatch):
    plain, pooled = engines
    monkeypatch.setattr(pooled.target, "verify", None)  # what rounds with the host in between would call
    expected = plain.generate(request(1, 0, sampling)).token_ids
    for budget in BUDGETS:
        emission = pooled.generate(request(1, budget, sampling))
        assert emission.token_ids == expected, f"budget {budget}"
        stats, reference = emission.stats, plain.generate(request(1, budget, sampling)).stats
        assert stats.acceptance_histogram.total() == stats.decode_rounds
        assert stats.decode_rounds == pytest.approx(reference.decode_rounds, abs=2)
    assert pooled.device_rounds.state.allocator.num_free == pooled.device_rounds.state.allocator.num_pages


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_top_k_beyond_any_vocabulary_keeps_all(engines, temperature):
    """Clients write the largest number that they know for "all of them"."""
    plain, pooled = engines
    for top_k in (VOCAB, 2**31, 2**63):
        wide = request(2, 7, SamplingParams(temperature=temperature, top_k=top_k, top_p=0.9))
        assert pooled.generate(wide).token_ids == plain.generate(wide).token_ids


def test_requests_of_all_kinds_side_by_side_do_not_touch_each_other(engines):
    plain, pooled = engines
    requests = [
        request(1, 16),
        request(2, 0),
        request(3, 7, SAMPLED),
        request(4, 32, FILTERED),
        request(7, 16, RECOMMENDED),
        request(5, 64, max_tokens=3),
        request(6, 2, num_logprobs=2),
    ]
    alone = [plain.generate(each).token_ids for each in requests]
    assert run_together(pooled, requests) == alone


def test_a_stop_inside_a_path_ends_the_request_there(engines):
    plain, pooled = engines
    tokens = plain.generate(request(3, 0)).token_ids
    stop = tokens[9]
    first = tokens.index(stop)
    for budget in (0, 7, 64):
        emission = pooled.generate(request(3, budget, stop_token_ids=frozenset({stop})))
        assert emission.token_ids == tokens[: first + 1]
        assert emission.finish_reason == "stop"


def test_an_abort_in_flight_leaves_the_pools_as_they_were(engines):
    _, pooled = engines
    state = pooled.device_rounds.state
    free = state.allocator.num_free
    request_id = pooled.add(request(2, 16, max_tokens=60))
    while pooled.running_or_none(request_id) is None or pooled.running(request_id).stats.decode_rounds < 2:
        pooled.step()
    pooled.abort(request_id)
    other = request(1, 16)
    assert pooled.generate(other).token_ids == pooled.generate(request(1, 0)).token_ids
    assert state.allocator.num_free == free


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_who_begins_again_while_alone_in_flight_takes_nothing_from_that_round(engines, sampling):
    """As when memory runs out beside an older request that still prefills: nobody reads the round before it is back."""
    plain, pooled = engines
    each = request(2, 16, sampling, max_tokens=60)
    request_id, tokens, begun_again = pooled.add(each), [], False
    while pooled.has_work:
        for emission in pooled.step():
            tokens += emission.token_ids
        sequence = pooled.running_or_none(request_id)
        if sequence is not None and pooled.device_rounds.flying and not begun_again:
            pooled._close(sequence)
            pooled.scheduler.preempt(sequence)
            begun_again = True
    assert begun_again and tuple(tokens) == plain.generate(replace(each, tree_budget=0)).token_ids


def test_a_trace_shows_the_tree_that_the_device_built(engines):
    _, pooled = engines
    request_id = pooled.add(request(2, 16, max_tokens=12, trace=True))
    traces = []
    while pooled.has_work:
        traces += [e.trace for e in pooled.step() if e.request_id == request_id and e.trace]
    assert traces
    for trace in traces:
        assert 1 < trace.tree.num_nodes <= 17
        path = trace.acceptance.path
        assert trace.tree.token_ids[path[1:]].tolist() == trace.acceptance.token_ids[:-1].tolist()


def test_auto_emits_the_same_and_says_what_it_chose(engines):
    plain, pooled = engines
    auto = start_auto(pooled, {"0.0": {"16": 3.0, "64": 4.0}})
    requests = [request(1, "auto", max_tokens=40), request(2, "auto", SAMPLED), request(3, 7), request(4, "auto", FILTERED)]
    expected = [plain.generate(replace(each, tree_budget=0)).token_ids for each in requests]
    assert run_together(pooled, requests) == expected
    emission = pooled.generate(requests[0])
    assert emission.token_ids == expected[0]
    assert emission.stats.tree_budget == "auto"
    assert emission.stats.predicted_s > 0
    assert "tree budget: 0 " in auto.describe()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_round_of_another_shape_is_launched_ahead_too(engines, sampling, monkeypatch):
    """Its roots only the device knows. Budgets change every round, and differ from request to request."""
    plain, pooled = engines
    requests = [request(n, 16, sampling, max_tokens=60) for n in (1, 2, 3)]
    expected = [plain.generate(replace(each, tree_budget=0)).token_ids for each in requests]
    uploads, upload = [], pooled.device_rounds._upload
    monkeypatch.setattr(pooled.device_rounds, "_upload", lambda *given: uploads.append(given[-1] is None) or upload(*given))
    ids = [pooled.add(each) for each in requests]
    tokens, budgets = {request_id: [] for request_id in ids}, (0, 7, 16, 2, 15, 0, 4)
    for number in range(200):
        if not pooled.has_work:
            break
        for place, request_id in enumerate(ids):
            sequence = pooled.running_or_none(request_id)
            if sequence is not None:
                sequence.tree_budget = budgets[(number + place) % len(budgets)]
        for emission in pooled.step():
            assert emission.error is None, emission.error
            tokens[emission.request_id] += emission.token_ids
    assert [tuple(tokens[request_id]) for request_id in ids] == expected
    assert any(uploads), "without waiting for the round before"


def test_auto_takes_a_shape_to_cost_what_it_costs(engines):
    """Also of several sequences, whose rows all count; and anew when rounds get slower, as they do with the context."""
    _, pooled = engines
    auto = DeviceAuto(pooled.device_rounds, {"0.0": {"16": 3.0}}, block_size=16, max_budget=16)
    costs = auto.costs_of(2, sampled=False)
    assert len(costs) == len(auto.ladder)
    assert (costs > 0).all()
    state = pooled.device_rounds.state
    assert state.table.context_lengths[state.dummy] == 0, "timing leaves nothing behind"
    shape = RoundShape(2, 15)
    before = costs[-1]
    for _ in range(60):
        auto.timed(shape, before)  # a thousand times as long
    assert auto.costs_of(2, sampled=False)[-1] > 900 * before
    auto.timed(RoundShape(2, 16), 1.0)  # a budget that it does not choose among
    assert (auto.costs_of(2, sampled=False)[:-1] == costs[:-1]).all()


@pytest.mark.parametrize("budget", [7, "auto"])
def test_timing_a_shape_while_it_flies_takes_no_token(engines, budget):
    """Auto times what it has not yet seen when it first occurs; others' rounds of the same shape may be under way."""
    plain, pooled = engines
    pooled.auto = pooled.device_rounds.auto = DeviceAuto(pooled.device_rounds, {"0.0": {"16": 3.0}}, block_size=16, max_budget=7)
    requests = [request(n, budget, SAMPLED, max_tokens=40) for n in (1, 2)]
    expected = [plain.generate(replace(each, tree_budget=0)).token_ids for each in requests]
    ids = [pooled.add(each) for each in requests]
    tokens, number = {request_id: [] for request_id in ids}, 0
    while pooled.has_work:
        for emission in pooled.step():
            tokens[emission.request_id] += emission.token_ids
        number += pooled.device_rounds.flying
        if number in (2, 5):
            pooled.auto.costs.clear()
            pooled.auto.costs_of(2, sampled=True)
    assert number > 5 and [tuple(tokens[request_id]) for request_id in ids] == expected


def test_trees_larger_than_any_captured_are_refused_at_the_start(engines):
    plain, _ = engines
    config = EngineConfig(max_context=512, max_tree_budget=1040)
    with pytest.raises(ValueError, match="max_tree_budget must be <= 1024 over pools.*got 1040: lower it"):
        pooled_engine(plain.target.model, plain.drafter.model, config)
