"""Rounds whose trees are ranked by an adapter: same output as plain decoding at every budget, host and device alike."""

from __future__ import annotations

import pytest
import torch

from ddtree.doctor.hybrid import VOCAB, random_hybrid
from ddtree.engine.config import EngineConfig
from ddtree.engine.drafter import Drafter
from ddtree.engine.engine import Engine
from ddtree.engine.measure import start_auto
from ddtree.engine.pooled import pooled_engine
from ddtree.engine.request import Request, RequestStats
from ddtree.engine.sequence import Sequence
from ddtree.models.adapter import PAIRWISE, SUMMARIES, Adapter, AdapterConfig
from ddtree.models.conditioning import Conditioning
from ddtree.sampling.params import SamplingParams
from tests.engine.test_device_rounds import FILTERED, GREEDY, SAMPLED, request, run_together

BUDGETS = (1, 7, 16, 64)
MANY_BUDGETS = (0, 1, 2, 3, 7, 15, 16, 31, 32, 63, 64, 65, 127, 128)
PENALISED = SamplingParams(temperature=0.8, presence_penalty=0.5, logit_bias=((0, 2.0),))


def adapter_for(engine, summary: str) -> Adapter:
    torch.manual_seed(8)
    shape = AdapterConfig(engine.drafter.model.config.hidden_size, engine.block_size, 32, 16, summary)
    adapter = Adapter(shape)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(0.0, 0.2)
    return adapter.requires_grad_(False)


KINDS = [pytest.param(kind, marks=pytest.mark.long) if kind == "attention" else kind for kind in SUMMARIES]


@pytest.fixture(scope="module", name="engines", params=KINDS)
def _engines(request):
    """Plain decoding; with an adapter over per-sequence caches; over pools."""
    plain = random_hybrid("cpu", torch.float32)
    model, drafter, adapter = plain.target.model, plain.drafter.model, adapter_for(plain, request.param)
    config = EngineConfig(max_context=512, max_tree_budget=128, prefill_chunk=24, max_running=3)
    single = Engine(plain.target, Drafter(drafter, model, Conditioning(adapter, model, tables=False)), config, VOCAB)
    pooled = pooled_engine(model, drafter, config, max_rows=512, conditioning=Conditioning(adapter, model, tables=True))
    return plain, single, pooled


KINDS = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FILTERED, PENALISED], ids=["greedy", "sampled", "filtered", "penalised"])


@KINDS
def test_every_budget_emits_the_same(engines, sampling):
    check(engines, sampling, BUDGETS, 9)


@pytest.mark.long
@KINDS
def test_many_budgets_emit_the_same(engines, sampling):
    check(engines, sampling, MANY_BUDGETS, 40)


def check(engines, sampling, budgets, max_tokens):
    plain, single, pooled = engines
    expected = plain.generate(request(1, 0, sampling, max_tokens)).token_ids
    for budget in budgets:
        one, other = (engine.generate(request(1, budget, sampling, max_tokens)) for engine in (single, pooled))
        assert one.token_ids == other.token_ids == expected, f"budget {budget}"
        assert one.stats.scoring == ("conditioned" if budget else None)


def trees_of(engine, asked: Request) -> list[tuple[int, ...]]:
    engine.add(asked)
    found = []
    while engine.has_work:
        found += [emission.trace.tree for emission in engine.step() if emission.trace]
    return [tuple(tree.token_ids.tolist()) for tree in found]


def test_the_trees_are_other_ones_and_a_request_may_decline(engines):
    _, single, pooled = engines
    trees = {
        scoring: [trees_of(engine, request(2, 16, GREEDY, 24, trace=True, scoring=scoring)) for engine in (single, pooled)]
        for scoring in ("factorised", "conditioned", None)
    }
    assert trees[None] == trees["conditioned"]
    for one, other in list(zip(*trees["conditioned"], strict=False))[:3]:
        assert one == other  # further on fewer depths are left, and the device does not always know
    assert trees["conditioned"][0] != trees["factorised"][0]


def test_a_batch_of_both_kinds(engines):
    plain, single, pooled = engines
    requests = [request(0, 16, GREEDY, 9), request(1, 7, SAMPLED, 9, scoring="factorised"), request(2, 0, GREEDY, 9), request(3, 32, FILTERED, 9)]
    expected = [plain.generate(each).token_ids for each in requests]
    assert run_together(single, requests) == run_together(pooled, requests) == expected


def ended(engine, requests: list[Request]) -> list[RequestStats]:
    """The stats of requests that run side by side."""
    ids, stats = [engine.add(each) for each in requests], {}
    while engine.has_work:
        stats |= {each.request_id: each.stats for each in engine.step() if each.finish_reason}
    return [stats[each] for each in ids]


def test_beside_a_request_that_declines_the_answer_says_what_was_used(engines):
    """A round on the device is scored one way; elsewhere each request has its own."""
    _, single, pooled = engines
    requests = [request(2, 16, GREEDY, 24), request(3, 16, GREEDY, 6, scoring="factorised"), request(1, 16, GREEDY, 1)]
    on_device = single.drafter.conditioning.adapter.config.summary in PAIRWISE
    for engine in (single, pooled):
        both, declined, undrafted = ended(engine, requests)
        drafted = both.decode_rounds - both.plain_rounds
        beside = declined.decode_rounds - declined.plain_rounds
        assert drafted > beside > 0 == declined.conditioned_rounds and declined.scoring == "factorised"
        used = drafted - beside if engine is pooled and on_device else drafted
        assert both.conditioned_rounds == used and both.scoring == ("conditioned" if 2 * used >= drafted else "factorised")
        assert undrafted.conditioned_rounds == 0 and undrafted.scoring is None  # its one token came with the prompt


@pytest.mark.parametrize("spared", [False, True])
def test_the_answer_says_how_its_trees_were_ranked(engines, spared, monkeypatch):
    """Also where auto leaves the adapter out."""
    _, single, pooled = engines
    monkeypatch.setattr(Sequence, "spared", property(lambda _: spared, lambda _, value: None))
    said = "factorised" if spared else "conditioned"
    for engine in (single, pooled):
        engine.add(request(2, 16, GREEDY, 9, trace=True))
        emissions = []
        while engine.has_work:
            emissions += engine.step()
        assert emissions[-1].stats.scoring == said
        assert all(each.trace.scoring == (said if each.trace.tree.num_drafted else None) for each in emissions if each.trace)


@pytest.mark.long
def test_auto_buys_nodes_by_the_adapters_scores(engines):
    plain, single, pooled = engines
    if single.drafter.conditioning.adapter.config.summary != "none":
        pytest.skip("measuring takes its time: shown for one kind")
    expected = plain.generate(request(1, 0, GREEDY, 25)).token_ids
    for engine in (single, pooled):
        if engine.auto is None:
            start_auto(engine, {"0": {"1": 1.5, "16": 2.5, "64": 3.0}}, limit_s=0.5)
        asked = Request(request(1, 0).prompt_token_ids, 25, tree_budget="auto")
        emission = engine.generate(asked)
        assert emission.token_ids == expected and emission.stats.scoring == "conditioned"


def test_what_is_not_there_is_refused(engines):
    plain, single, _ = engines
    with pytest.raises(ValueError, match="scoring conditioned needs an adapter"):
        plain.add(request(1, 16, scoring="conditioned"))
    with pytest.raises(ValueError, match="scoring must be factorised or conditioned, got 'both'"):
        single.add(request(1, 16, scoring="both"))
