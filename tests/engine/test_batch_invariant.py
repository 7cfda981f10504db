"""The batch-invariant mode: what a request says, and how sure the target was of it, to the last bit, alone and in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddtree.bench.run import engine_facts
from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import Engine
from ddtree.engine.loading import load_engine
from ddtree.engine.measure import facts_of as cost_facts
from ddtree.engine.pooled import pooled_engine
from ddtree.sampling.params import SamplingParams
from ddtree.server.facts import facts_of
from tests.engine.pools import Pair, ask, run_schedule, seeded, tokens
from tests.scripted import VOCAB, ScriptedTarget

GPU = torch.cuda.is_available()
# A hybrid's twins are vectorised over rows of few heads, which a CPU rounds by their place: bits are a GPU's affair there.
PAIRS = ["llama-cpu"] + [
    pytest.param(f"{family}-cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")])
    for family in ("llama", "hybrid")
]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request):
    """A random pair in fp32 on the CPU, in bf16 on a GPU."""
    family, device = request.param.split("-")
    pair = Pair(family)
    if device == "cuda":
        pair.target, pair.drafter = on_gpu(pair.target), on_gpu(pair.drafter)
    return pair


def on_gpu(model):
    copied = type(model)(model.config, "cuda", torch.bfloat16)
    for (_, there), (_, here) in zip(copied.checkpoint_tensors(), model.checkpoint_tensors(), strict=True):
        there.copy_(here)
    if hasattr(copied, "finish_loading"):
        copied.finish_loading()
    return copied.eval()


def requests(logprobs: int | None) -> list:
    """Greedy and drawn, of several budgets, two of them behind one prompt."""
    prompts = [tokens(i, 38 + 4 * i) for i in range(3)]
    prompts.append((*prompts[2][:40], *tokens(9, 5)))
    each = zip(prompts, (8, 0, 16, 16), (0.0, 0.7, 1.0, 0.0), strict=True)
    return [
        ask(prompt, budget, 45, sampling=SamplingParams(temperature), seed=i, num_logprobs=logprobs)
        for i, (prompt, budget, temperature) in enumerate(each)
    ]


def plain_and_alone(pair: Pair, wanted: list) -> list:
    """Of an engine that drafts nothing, remembers nothing and prefills at once."""
    config = EngineConfig(max_context=512, prefill_chunk=512, batch_invariant=True)
    engine = pooled_engine(pair.target, None, config)
    return [engine.generate(replace(each, tree_budget=0, cache_salt=None)) for each in wanted]


class Listener:
    """An engine's `step`, with the log-probabilities of every token kept."""

    def __init__(self, engine) -> None:
        self.logprobs, self.step = {}, engine.step
        engine.step = self

    def __call__(self):
        emissions = self.step()
        for emission in emissions:
            self.logprobs.setdefault(emission.request_id, []).extend(emission.logprobs)
        return emissions


@pytest.mark.parametrize(
    "logprobs", [pytest.param(None, marks=pytest.mark.long, id="on the device"), pytest.param(3, id="with the host")]
)
def test_company_budgets_chunks_and_preemption_change_no_bit(pair, logprobs):
    wanted = requests(logprobs)
    expected = plain_and_alone(pair, wanted)
    few_pages = {"num_tokens": 128, "max_context": 170, "max_running": 4, "prefix_bytes": 0}
    engine = pair.engine(prefill_chunk=40, batch_invariant=True, **few_pages)
    listener = Listener(engine)
    courses = run_schedule(engine, wanted, seeded(0), join_share=1.0)
    for number, (course, alone) in enumerate(zip(courses, expected, strict=True)):
        assert tuple(course.token_ids) == alone.token_ids, f"request {number}"
        assert listener.logprobs[number] == list(alone.logprobs), f"request {number}"
    assert sum(course.stats.preemptions for course in courses) > 0
    engine = pair.engine(prefill_chunk=23, batch_invariant=True)
    again = run_schedule(engine, wanted[::-1], seeded(4), join_share=1.0)[::-1]
    assert [tuple(course.token_ids) for course in again] == [alone.token_ids for alone in expected]
    repeated = engine.generate(wanted[2])  # behind its own remembered prompt
    assert repeated.token_ids == expected[2].token_ids
    assert repeated.stats.cached_tokens > 0


def test_a_cpu_engine_says_why_it_has_no_such_mode(tmp_path):
    with pytest.raises(ValueError, match="batch_invariant is for the engine of a GPU, this one runs on cpu: leave it out"):
        load_engine(tmp_path, device="cpu", batch_invariant=True)


def test_an_engine_without_pools_does_not_claim_the_mode():
    with pytest.raises(ValueError, match="batch_invariant needs an engine over pools .*: leave it out"):
        Engine(ScriptedTarget(), None, EngineConfig(max_context=64, batch_invariant=True), VOCAB)


def test_the_mode_is_said_where_results_are_read(pair):
    for chosen in (True, False):
        engine = pair.engine(batch_invariant=chosen)
        assert facts_of(engine, 0).batch_invariant is chosen  # what /stats and the start-up line say
        assert engine_facts(engine)["batch_invariant"] is chosen  # a benchmark's result
        assert cost_facts(engine)["batch_invariant"] is chosen  # costs that were measured in the other mode are not taken
