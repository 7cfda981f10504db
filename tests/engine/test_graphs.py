"""CUDA graphs: a replay gives what calling the same functions gives, bit for bit, also after shorter trees; and the GPU emits
what the CPU emits."""

from __future__ import annotations

from dataclasses import replace

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
    config = EngineConfig(max_context=512, max_tree_budget=128, prefill_chunk=40, max_running=3)
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
@pytest.mark.parametrize("kind", ["greedy", "sampled", "filtered"])
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
    # Prompts side by side, short ones and such as are not captured.
    for seeds, budget in (((0, 1, 2), 8), ((3, 0, 3), 0), ((2, 1, 0), 16)):
        wanted = [request(seed, budget, SAMPLINGS[kind]) for seed in seeds]
        assert together(eager, wanted) == together(captured, wanted)
        assert all(torch.equal(x, y) for x, y in zip(tensors(eager), tensors(captured), strict=True)), f"a pool differs after {seeds}"


def together(engine, requests: list[Request]) -> list[tuple[int, ...]]:
    """What each says when all come at once."""
    answers = {engine.add(each): () for each in requests}
    while engine.has_work:
        for emission in engine.step():
            assert emission.error is None, emission.error
            answers[emission.request_id] += emission.token_ids
    return list(answers.values())


def tensors(engine):
    """Everything that the engine's pools hold for its sequences; the null page takes what padding writes, in any order."""
    state = engine.device_rounds.state
    for pool in (state.target.pool.attention, state.drafter.pool):
        yield pool.key_pages[:, 1:]
        yield pool.value_pages[:, 1:]
    recurrent = state.target.pool.recurrent
    yield recurrent.states[:, : state.dummy]
    yield recurrent.conv_states[:, : state.dummy]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["greedy", "sampled", "filtered"])
def test_shared_prefixes_and_preemption_change_no_token(kind, device="cuda"):
    """Turns of a chat, one ended by a stop; then more requests than the pages hold, all with rounds in flight."""
    torch.backends.cuda.matmul.allow_tf32 = False
    plain, pair = random_hybrid("cpu", torch.float32), random_hybrid(device, torch.float32)
    config = EngineConfig(
        max_context=400, max_tree_budget=16, prefill_chunk=64, max_running=5, prefix_bytes=2**30, snapshot_every=64
    )
    engine = pooled_engine(pair.target.model, pair.drafter.model, config, num_tokens=300)

    def check(wanted: Request) -> int:
        emission = engine.generate(wanted)
        assert emission.token_ids == plain.generate(replace(wanted, cache_salt=None)).token_ids
        return emission.stats.cached_tokens

    first = request(5, 8, SAMPLINGS[kind])
    stop = plain.generate(replace(first, cache_salt=None)).token_ids[17]
    first = replace(first, stop_token_ids=frozenset({stop}))
    assert check(first) == 0
    prompt = first.prompt_token_ids
    assert check(first) == len(prompt) - 1
    history = (*prompt, *plain.generate(replace(first, cache_salt=None)).token_ids)
    assert check(replace(first, prompt_token_ids=(*history, 3, 5, 8), tree_budget=0)) == len(history) - 1
    requests = [request(i, [16, 8, 0, 4, 16][i], SAMPLINGS[kind], max_tokens=80) for i in range(5)]
    ids, answers, preemptions = [engine.add(each) for each in requests], {}, 0
    while engine.has_work:
        for emission in engine.step():
            answers[emission.request_id] = answers.get(emission.request_id, ()) + emission.token_ids
            preemptions += emission.stats.preemptions if emission.stats else 0
    assert [answers[i] for i in ids] == [plain.generate(replace(each, cache_salt=None)).token_ids for each in requests]
    assert preemptions > 0
    assert engine.memory.pages.num_pages - engine.memory.pages.num_free == engine.prefix.num_pages
