"""Prompts side by side over pools: one forward for several, padded ones too, with what each would get alone; what waits and what fails."""

from __future__ import annotations

from functools import reduce

import pytest

from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from tests.engine.pools import FAMILIES, Pair, ask, check_pages, run_schedule, seeded, tokens
from tests.engine.schedules import check_courses

LENGTHS = (1, 5, 33, 17, 2, 16)
EVERY = 64  # tokens between remembered states, as these engines have it


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return Pair(request.param)


def watched(engine, padded: bool = False):
    """The engine; the numbers of tokens of each forward of several prompts, and of each of one. `padded`: as on a GPU."""
    engine.target.prompts.pads = padded
    together, alone, run = [], [], engine.target.prompts.run

    def seen(token_ids, *rest):
        counts = [len(ids) for ids in token_ids]
        (together if len(counts) > 1 else alone).append(counts)
        return run(token_ids, *rest)

    engine.target.prompts.run = seen
    return together, alone


def requests_of(count: int = len(LENGTHS), **options) -> list[Request]:
    kinds = (SamplingParams(), SamplingParams(temperature=0.8), SamplingParams(temperature=0.7, top_p=0.9))
    return [
        Request(tokens(50 + i, LENGTHS[i]), 9 + i, kinds[i % 3], seed=i, tree_budget=(8, 0, 3)[(i + i // 3) % 3], **options) for i in range(count)
    ]


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("batch_invariant", [False, pytest.param(True, marks=pytest.mark.long)], ids=["usual", "batch-invariant"])
def test_prompts_that_come_together_are_one_forward(pair, padded, batch_invariant):
    engine = pair.engine(prefix_bytes=0, prefill_chunk=80, max_running=8, batch_invariant=batch_invariant)
    together, alone = watched(engine, padded)
    requests = requests_of()
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, pair.cold)
    assert together == [list(LENGTHS)] and not alone
    assert all(course.stats.prefill_s > 0 and course.stats.ttft_s > 0 for course in courses)
    check_pages(engine)


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_a_hybrids_states_are_remembered_from_forwards_of_several(pair, padded):
    engine = pair.engine(prefill_chunk=256, max_running=8)
    together, _ = watched(engine, padded)
    prompts = [tokens(70 + i, count) for i, count in enumerate((40, 90, 17))]
    check_courses(run_schedule(engine, [ask(prompt) for prompt in prompts], seeded(0), join_share=1.0), pair.cold)
    # Of a hybrid up to the next state that is worth keeping: at every 64th token and before the last one.
    assert together == ([[39, EVERY, 16], [1, 89 - EVERY, 1]] if pair.is_hybrid else [[40, 90, 17]])
    for prompt in prompts:
        again = ask(prompt, max_tokens=5)
        emission = engine.generate(again)
        assert list(emission.token_ids) == pair.cold(again)
        assert emission.stats.cached_tokens == len(prompt) - 1
    check_pages(engine)


def test_choices_of_a_long_prompt_wait_for_the_first_and_then_go_together(pair):
    engine = pair.engine(prefill_chunk=256, max_running=8)
    together, alone = watched(engine)
    prompt = tokens(9, 200)
    requests = [ask(prompt, sampling=SamplingParams(temperature=0.8), seed=3, choice_index=i) for i in range(4)]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, pair.cold)
    assert sum(map(sum, alone)) == 200 and together == [[1, 1, 1]]
    assert sorted(course.stats.cached_tokens for course in courses) == [0, 199, 199, 199]
    check_pages(engine)


def test_nobody_waits_for_what_will_not_be_remembered(pair):
    engine = pair.engine(prefill_chunk=1024, max_running=8)
    together, _ = watched(engine)
    prompt = tokens(9, 200)
    salts = ("a", "b", None, None)
    check_courses(run_schedule(engine, [ask(prompt, cache_salt=salt) for salt in salts], seeded(0), join_share=1.0), pair.cold)
    assert len(together[0]) == 4


def test_nobody_waits_for_whoever_is_computed_again(pair):
    """A preempted sequence, whose prompt is not remembered once more."""
    engine = pair.engine(prefill_chunk=1024, max_running=8)
    together, _ = watched(engine)
    request = ask(tokens(9, 200))
    engine.add(request)
    emitted = [token_id for _ in range(3) for emission in engine.step() for token_id in emission.token_ids]
    (sequence,) = engine.scheduler.running
    engine.device_rounds.drain([sequence])
    engine._close(sequence)
    engine.scheduler.preempt(sequence)
    engine.prefix.clear()
    engine.add(ask((*request.prompt_token_ids, *tokens(8, 60))))
    while engine.has_work:
        emitted += [token_id for emission in engine.step() if emission.request_id == 0 for token_id in emission.token_ids]
    assert emitted == pair.cold(request)
    assert len(together[0]) == 2


def test_a_forward_takes_no_more_tokens_than_a_step_may(pair):
    engine = pair.engine(prefix_bytes=0, prefill_chunk=40, max_running=8)
    together, alone = watched(engine)
    requests = [ask(tokens(i, count)) for i, count in enumerate((30, 12, 9, 100, 3))]
    check_courses(run_schedule(engine, requests, seeded(0), join_share=1.0), pair.cold)
    assert max(map(sum, together + alone)) <= 40
    assert sum(map(sum, together + alone)) == 154


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_a_prompt_that_fails_ends_its_own_request_alone(pair, kind):
    engine = pair.engine(prefix_bytes=0, prefill_chunk=128, max_running=8)
    poison, run = 11, engine.target.prompts.run

    def spoilt(token_ids, *rest):
        if any(ids[0] == poison for ids in token_ids):
            raise kind("scripted: a spoilt prompt")
        return run(token_ids, *rest)

    engine.target.prompts.run = spoilt
    requests = [ask((first, 0, 2, *tokens(first, 20))) for first in (1, 2, poison, 4, 5)]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, pair.cold)
    assert [course.finish_reason for course in courses] == ["length", "length", "error", "length", "length"]
    assert "a spoilt prompt" in courses[2].error
    check_pages(engine)


@pytest.mark.parametrize(("part", "call"), [("target.prompts.run", 1), ("target._first_token", 3), ("drafter.absorb_together", 1)])
def test_a_fault_that_does_not_come_again_leaves_no_trace(pair, part, call):
    """Wherever in a forward of several it comes: everyone gets their tokens, and the log-probability of each, once."""
    engine, calls = pair.engine(prefix_bytes=0, prefill_chunk=128, max_running=8), []
    *owners, name = part.split(".")
    owner = reduce(getattr, owners, engine)
    work = getattr(owner, name)

    def spoilt(*given):
        result = work(*given)
        calls.append(part)
        if len(calls) == call:
            raise RuntimeError("scripted: once")
        return result

    setattr(owner, name, spoilt)
    requests = requests_of(num_logprobs=2)
    emitted = {engine.add(request): [] for request in requests}
    while engine.has_work:
        for emission in engine.step():
            emitted[emission.request_id].append(emission)
    for request, emissions in zip(requests, emitted.values(), strict=True):
        token_ids = [token_id for emission in emissions for token_id in emission.token_ids]
        assert token_ids == pair.cold(request)
        assert [each.token_id for emission in emissions for each in emission.logprobs] == token_ids
        assert emissions[-1].stats.output_tokens == len(token_ids)
    assert len(calls) >= call
    check_pages(engine)


@pytest.mark.parametrize(("max_running", "batches"), [(1, {1, 8}), (8, {1, 8}), (9, {1, 64})])
def test_shapes_are_captured_one_by_one_while_nobody_asks(pair, max_running, batches):
    engine = pair.engine(prefix_bytes=0, max_running=max_running)
    assert not engine.prepare_one(), "on a CPU nothing is captured"
    prompts = engine.target.prompts
    prompts.pads = True
    number = 1
    while engine.prepare_one():
        number += 1
    assert set(prompts._captured) == {(batch, rows) for batch in batches for rows in prompts.buckets}
    assert number == len(prompts._captured)
    request = ask(tokens(3, 21))
    assert list(engine.generate(request).token_ids) == pair.cold(request)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))])
def test_random_schedules_of_padded_prompts(pair, seed):
    """Joins in bursts, cancels, shared prefixes, in odd seeds too little memory: every answer as cold and alone, no page is lost."""
    rng, pressed = seeded(100 + seed), seed % 2
    engine = pair.engine(num_tokens=160 if pressed else 512, max_context=300, max_running=6, prefill_chunk=256)
    together, _ = watched(engine, padded=True)
    requests = [
        Request(
            tokens(300 + int(rng.integers(3)), int(rng.integers(1, 60))) + tokens(int(rng.integers(1000)), int(rng.integers(1, 30))),
            int(rng.integers(1, 40)),
            SamplingParams(temperature=float(rng.choice([0.0, 0.8]))),
            seed=int(rng.integers(100)),
            tree_budget=int(rng.choice([0, 3, 16])),
        )
        for _ in range(14 if seed < 2 else 50)
    ]
    courses = run_schedule(engine, requests, rng, cancel_share=0.03, join_share=0.8)
    check_courses(courses, pair.cold)
    assert not any(course.finish_reason == "error" for course in courses)
    assert together, "no forward was of several prompts"
    engine.step()
    check_pages(engine)
