"""CUDA graphs: a replay gives what calling the same functions gives, bit for bit, also after shorter trees; and the GPU emits
what the CPU emits."""

from __future__ import annotations

import pytest
import torch

from ddtree.doctor.hybrid import VOCAB, random_hybrid
from ddtree.engine.config import EngineConfig
from ddtree.engine.graphs import bucket_of
from ddtree.engine.pooled import pooled_engine
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams

BUDGETS = (0, 1, 2, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9),
    "penalised": SamplingParams(temperature=0.8, frequency_penalty=0.5),
}


def test_a_bucket_holds_what_is_put_into_it():
    assert [bucket_of(value, (1, 4, 9)) for value in (0, 1, 2, 9)] == [1, 1, 4, 9]
    with pytest.raises(ValueError, match="no bucket holds 10"):
        bucket_of(10, (1, 4, 9))


def request(seed: int, budget: int, sampling: SamplingParams, max_tokens: int = 40) -> Request:
    prompt = torch.randint(0, VOCAB, (5 + 13 * seed,), generator=torch.Generator().manual_seed(seed))
    return Request(tuple(prompt.tolist()), max_tokens, sampling, seed=seed, tree_budget=budget)


def on_gpu(dtype: torch.dtype, graphs: bool):
    pair = random_hybrid("cuda", dtype)
    config = EngineConfig(max_context=512, max_tree_budget=128, prefill_chunk=24, max_running=3)
    return pooled_engine(pair.target.model, pair.drafter.model, config, max_rows=512, graphs=graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_the_gpu_emits_what_the_cpu_emits(kind):
    torch.backends.cuda.matmul.allow_tf32 = False
    sampling = SAMPLINGS[kind]
    expected = random_hybrid("cpu", torch.float32).generate(request(1, 0, sampling)).token_ids
    engine = on_gpu(torch.float32, graphs=True)
    for budget in BUDGETS:
        assert engine.generate(request(1, budget, sampling)).token_ids == expected, f"budget {budget}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_replay_equals_the_same_calls_bit_for_bit(dtype, kind):
    eager, captured = (on_gpu(dtype, graphs) for graphs in (False, True))
    # Long trees before short ones: stale rows of a larger tree must not show.
    for seed, budget in enumerate((*BUDGETS[::-1], *BUDGETS)):
        wanted = request(seed % 4, budget, SAMPLINGS[kind])
        a, b = eager.generate(wanted), captured.generate(wanted)
        assert a.token_ids == b.token_ids, f"budget {budget}"
        assert a.stats.acceptance_histogram == b.stats.acceptance_histogram
        pools = zip(tensors(eager), tensors(captured), strict=True)
        assert all(torch.equal(x, y) for x, y in pools), f"a pool differs after budget {budget}"


def tensors(engine):
    """Everything that the engine's pools hold for its sequences; the null page takes what padding writes, in any order."""
    state = engine.device_rounds.state
    for pool in (state.target.pool.attention, state.drafter.pool):
        yield pool.key_pages[:, 1:]
        yield pool.value_pages[:, 1:]
    recurrent = state.target.pool.recurrent
    yield recurrent.states[:, : state.dummy]
    yield recurrent.conv_states[:, : state.dummy]
