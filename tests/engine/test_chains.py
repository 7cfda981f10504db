"""Chains to compare trees with: the best token at each depth, below its own parent where there is an adapter; the same over
pools, whole on the device, as over per-sequence caches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ddtree.doctor.hybrid import VOCAB, random_hybrid
from ddtree.engine.config import EngineConfig
from ddtree.engine.device_auto import DeviceAuto
from ddtree.engine.device_round import RoundShape
from ddtree.engine.drafter import Drafter
from ddtree.engine.engine import Engine
from ddtree.engine.pooled import pooled_engine
from ddtree.engine.request import Request
from ddtree.models.conditioning import Conditioning
from ddtree.sampling.params import SamplingParams
from tests.engine.test_conditioned_rounds import adapter_for
from tests.engine.test_device_rounds import FILTERED, GREEDY, SAMPLED, request, run_together
from tests.scripted import scripted_engine

BLOCK = 6  # of the random pair
KINDS = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
SCORINGS = pytest.mark.parametrize("scoring", ["factorised", "conditioned"])


def pair_of_engines(device: str, graphs: bool = True, summary: str = "none") -> tuple[Engine, Engine]:
    """Per-sequence caches on the CPU, and pools on `device`; one adapter beside both."""
    plain, model_pair = random_hybrid("cpu", torch.float32), random_hybrid(device, torch.float32)
    adapter, config = adapter_for(plain, summary), EngineConfig(max_context=512, max_tree_budget=64, prefill_chunk=24, max_running=3)
    model = plain.target.model
    host = Engine(plain.target, Drafter(plain.drafter.model, model, Conditioning(adapter, model, tables=False)), config, VOCAB)
    model, drafter = model_pair.target.model, model_pair.drafter.model
    conditioning = Conditioning(adapter_for(plain, summary).to(device), model, tables=True)
    return host, pooled_engine(model, drafter, config, max_rows=256, conditioning=conditioning, graphs=graphs)


@pytest.fixture(scope="module", name="engines")
def _engines():
    return pair_of_engines("cpu")


def chain(seed: int, sampling: SamplingParams = GREEDY, length: int = BLOCK - 1, **more) -> Request:
    return request(seed, length, sampling, chain=True, **more)


def trees_of(engine: Engine, asked: Request) -> list:
    engine.add(replace(asked, trace=True))
    found = []
    while engine.has_work:
        found += [emission.trace.tree for emission in engine.step() if emission.trace]
    return found


@KINDS
@SCORINGS
def test_a_captured_chain_is_the_hosts(engines, sampling, scoring, monkeypatch):
    host, pooled = engines
    monkeypatch.setattr(pooled.target, "verify", None)  # the host's part: a whole round needs none of it
    asked = chain(2, sampling, max_tokens=12, scoring=scoring)
    trees, others = trees_of(host, asked), trees_of(pooled, asked)
    assert len(trees) > 3
    assert all(tree.is_chain for tree in [*trees, *others])
    for one, other in list(zip(trees, others, strict=False))[:3]:  # further on fewer depths are left, which the device does not know
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.num_drafted == BLOCK - 1
        assert one.scores == pytest.approx(other.scores, abs=1e-4)


def test_with_an_adapter_each_node_is_its_parents_best_child(engines):
    host, _ = engines
    conditioned, factorised = (trees_of(host, chain(2, max_tokens=9, scoring=name))[0] for name in ("conditioned", "factorised"))
    assert conditioned.token_ids.tolist() != factorised.token_ids.tolist()
    # A tree whose best-first order meets the chain first keeps it: its best path, level by level, is the chain.
    tree, node = trees_of(host, request(2, 64, max_tokens=9, scoring="conditioned"))[0], 0
    for depth in range(1, 4):
        children = tree.children(node)
        if not len(children):
            break
        node = int(children[0])
        assert tree.token_ids[node] == conditioned.token_ids[depth]


def test_a_chain_knows_the_grandparent_where_the_adapter_does(monkeypatch):
    host, pooled = pair_of_engines("cpu", summary="grandparent")
    monkeypatch.setattr(pooled.target, "verify", None)
    one, other = (trees_of(engine, chain(2, SAMPLED, max_tokens=8))[0] for engine in (host, pooled))
    assert one.is_chain and one.token_ids.tolist() == other.token_ids.tolist()
    assert one.scores == pytest.approx(other.scores, abs=1e-4)


@SCORINGS
def test_no_chain_promises_more_than_the_tree_of_as_many_nodes(engines, scoring):
    """Why auto needs none (docs/auto.md): at the scores that both are built by."""
    host, _ = engines
    for length in (2, BLOCK - 1):
        first, second = (trees_of(host, replace(chain(3, length=length, max_tokens=8, scoring=scoring), chain=kind))[0] for kind in (True, False))
        promised = [np.exp(tree.scores[1:].astype(np.float64)).sum() for tree in (first, second)]
        assert first.num_drafted == second.num_drafted == length and promised[0] <= promised[1] + 1e-9


@KINDS
@SCORINGS
def test_every_length_emits_the_same(engines, sampling, scoring):
    host, pooled = engines
    expected = host.generate(request(1, 0, sampling, 9)).token_ids
    for length in (2, BLOCK - 1):
        emissions = [engine.generate(chain(1, sampling, length, max_tokens=9, scoring=scoring)) for engine in engines]
        for emission in emissions:
            assert emission.token_ids == expected, f"length {length}"
            stats = emission.stats
            assert (stats.mode, stats.tree_budget, stats.reason) == ("chain", length, None)
            assert stats.nodes_verified <= length * stats.decode_rounds
    assert pooled.device_rounds.prepare(RoundShape(1, BLOCK - 1, sampling is SAMPLED, scoring == "conditioned", chain=True)).path_rows == BLOCK


def test_chains_side_by_side_and_beside_trees(engines):
    """Chains of other lengths share a captured round, drawn from what filters keep or not; beside a tree the host builds them."""
    host, pooled = engines
    for requests in (
        [chain(1, max_tokens=9), chain(2, SAMPLED, 4, max_tokens=9), request(3, 0, max_tokens=9)],
        [chain(1, max_tokens=9), request(2, 16, max_tokens=9), chain(4, FILTERED, max_tokens=9)],
    ):
        plain = [host.generate(replace(each, tree_budget=0, chain=False)).token_ids for each in requests]
        assert run_together(pooled, requests) == run_together(host, requests) == plain
    allocator = pooled.device_rounds.state.allocator
    assert allocator.num_free == allocator.num_pages


def test_what_a_chain_costs_teaches_auto_nothing(engines):
    _, pooled = engines
    auto = DeviceAuto(pooled.device_rounds, {"0": {"3": 2.0}}, BLOCK, max_budget=3)
    before = auto.costs_of(1, False, conditioned=False).copy()
    auto.timed(RoundShape(1, 3, chain=True), 1.0)
    assert (auto.costs_of(1, False, conditioned=False) == before).all()


def test_a_chain_is_no_longer_than_a_block():
    engine = scripted_engine(0.9, block_size=8)
    stats = engine.generate(Request((1, 2, 3), 20, tree_budget=64, chain=True)).stats
    assert stats.tree_budget == 7 and stats.mode == "chain"
    assert stats.reason == "tree_budget 64 was clamped to 7, the depths of a block: so long is a chain"
    engine.auto = object()
    with pytest.raises(ValueError, match='chain needs a tree_budget that is a number of nodes, got "auto"'):
        engine.add(Request((1, 2, 3), 20, tree_budget="auto", chain=True))


@pytest.mark.gpu
@KINDS
@SCORINGS
@pytest.mark.parametrize("summary", ["none", "grandparent"])
def test_on_the_gpu_captured_equals_eager_equals_the_host(sampling, scoring, summary):
    torch.backends.cuda.matmul.allow_tf32 = False
    host, captured = pair_of_engines("cuda", summary=summary)
    _, eager = pair_of_engines("cuda", graphs=False, summary=summary)
    plain = host.generate(request(1, 0, sampling, 40)).token_ids
    for length in (1, 4, BLOCK - 1):
        asked = chain(1, sampling, length, max_tokens=40, scoring=scoring)
        one, other = captured.generate(asked), eager.generate(asked)
        assert one.token_ids == other.token_ids == host.generate(asked).token_ids == plain, f"length {length}"
        assert one.stats.acceptance_histogram == other.stats.acceptance_histogram
        trees = [trees_of(engine, asked) for engine in (captured, eager, host)]
        for first, second, third in list(zip(*trees, strict=False))[:3]:
            assert first.is_chain and first.token_ids.tolist() == second.token_ids.tolist() == third.token_ids.tolist()
            assert (first.scores == second.scores).all()
