"""Many requests at once, with scripted actors: who runs when, and what fits."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree.engine.config import EngineConfig
from ddtree.engine.request import Request
from ddtree.engine.room import share_rows
from ddtree.sampling.params import SamplingParams
from tests.engine.batches import MEMORY, PROMPT, engine_of, expected, mixed
from tests.engine.schedules import SpoiltWatcher, check_courses, run_schedule, seeded
from tests.scripted import VOCAB


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
@pytest.mark.parametrize("pressed", [False, True])
def test_random_schedules_equal_solo(seed, pressed):
    """64 requests joining at random, cancels and faults in between; `pressed`: memory for about three of them."""
    rng = seeded(seed)
    limits = {"cache_bytes": MEMORY} if pressed else {"max_rows": 100}
    engine = engine_of(prefill_chunk=16, **limits)
    requests = mixed(64, rng, *((20, 100) if pressed else ()))
    for index in rng.choice(64, 4, replace=False):
        requests[index] = replace(requests[index], watcher=SpoiltWatcher(int(rng.integers(1, 20))))
    courses = run_schedule(engine, requests, rng, cancel_share=0.1)
    check_courses(courses, expected)
    assert sum(course.finish_reason == "error" for course in courses) <= 4
    assert sum(course.cancelled for course in courses) > 2
    if pressed:
        assert sum(c.stats.preemptions for c in courses if c.stats) > 0, "memory was never short"
        assert engine.memory.pages.num_free == engine.memory.pages.num_pages


def test_one_forward_carries_all_trees():
    engine = engine_of()
    requests = [Request((i, 0, 2), 30, tree_budget=[0, 4, 16, 64][i % 4]) for i in range(8)]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, expected)
    verifies = [entry for entry in engine.target.log if entry[0] == "verify"]
    assert len(verifies) == engine.target.num_verifies == max(c.stats.decode_rounds for c in courses)
    assert len(verifies[0][1]) == 8


def test_those_that_decode_wait_for_one_chunk_at_most():
    engine = engine_of(prefill_chunk=8, max_running=3)
    engine.add(Request(PROMPT, 120, tree_budget=4))
    for _ in range(3):
        engine.step()
    engine.add(Request(tuple(range(10)) * 12, 20))
    engine.add(Request(tuple(range(9)) * 12, 20))
    engine.target.log.clear()
    while engine.scheduler.has_prefill or engine.num_waiting:
        engine.step()
    log, stalled = engine.target.log, 0
    for kind, _, size in log:
        stalled = stalled + size if kind == "prefill" else 0
        assert stalled <= 8, "more than a chunk between two rounds"
    assert sum(kind == "verify" for kind, *_ in log) >= 20


def test_short_prompts_do_not_wait_for_a_long_one_nor_starve_it():
    engine = engine_of(prefill_chunk=8, max_running=8)
    long = engine.add(Request(tuple(i % VOCAB for i in range(200)), 5))
    engine.step()
    short = engine.add(Request(PROMPT, 5))
    steps = 0
    while engine.running_or_none(short) is None or not engine.running(short).num_emitted:
        engine.step()
        steps += 1
    assert steps <= 4
    began = engine.running(long).num_prefilled
    for index in range(40):  # one more short prompt with every step
        engine.add(Request((index % VOCAB, 1), 2))
        engine.step()
    assert engine.running_or_none(long) is None or engine.running(long).num_prefilled > began + 8 * 8


def test_chunks_shrink_to_what_a_stall_may_take():
    engine = engine_of(prefill_chunk=512, max_stall_s=0.2)
    scheduler = engine.scheduler
    engine.add(Request(PROMPT, 50))
    engine.step()
    scheduler._prefill_token_s = 0.0
    scheduler.note_prefill(512, 512 * 0.002)
    assert scheduler.decoding and scheduler.chunk_tokens() == 100
    scheduler.note_prefill(1, 10.0)  # as when a forward is captured or compiled: that says little of the next
    assert scheduler.chunk_tokens() >= 50
    for _ in range(8):
        scheduler.note_prefill(1, 10.0)
    assert scheduler.chunk_tokens() == 16, "slow for good"
    engine.abort(0)
    assert scheduler.chunk_tokens() == 512, "nobody is stalled"


def test_first_come_first_served_by_what_fits():
    """A large request is not overtaken for ever by small ones behind it."""
    engine = engine_of(cache_bytes=MEMORY, max_running=8)
    order = []
    sizes = [100, 100, 300, 5, 5]
    ids = {engine.add(Request(tuple(i % VOCAB for i in range(size)), 10)): size for size in sizes}
    while engine.has_work:
        order += [ids[e.request_id] for e in engine.step() if e.finish_reason]
    assert order.index(300) < 3 or order[:2] == [100, 100]
    assert sorted(order) == sorted(sizes)


def test_preemption_loses_nothing_and_spares_the_oldest():
    engine = engine_of(cache_bytes=MEMORY)
    requests = [Request((i, 0, 2), 120, SamplingParams(temperature=0.7), seed=i, tree_budget=8) for i in range(5)]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, expected)
    assert courses[0].stats.preemptions == 0
    assert sum(course.stats.preemptions for course in courses) > 0
    assert all(course.stats.output_tokens == 120 for course in courses)


def test_trees_shrink_before_anyone_is_preempted():
    engine = engine_of(cache_bytes=MEMORY)
    courses = run_schedule(engine, [Request(PROMPT, 300, tree_budget=64)], seeded(0))
    check_courses(courses, expected)
    assert courses[0].stats.preemptions == 0 and courses[0].stats.nodes_verified > 100


def test_what_can_never_fit_is_refused_at_the_start():
    with pytest.raises(ValueError, match="cache_bytes 200 hold .* tokens of one sequence, max_context is 400"):
        engine_of(cache_bytes=200)
    with pytest.raises(ValueError, match="cache_bytes must be >= "):
        engine_of(cache_bytes=3)


def test_a_forward_never_has_more_rows_than_it_may():
    engine = engine_of(max_rows=40)
    requests = [Request((i, 0, 2), 40, tree_budget=64) for i in range(6)] + [Request((7, 1), 40), Request((8, 1), 40, tree_budget=2)]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, expected)
    rows = [size for kind, _, size in engine.target.log if kind == "verify"]
    assert max(rows) <= 40 and max(rows) > 30
    assert courses[-1].stats.acceptance_histogram and max(courses[0].stats.acceptance_histogram) > 1


@pytest.mark.parametrize(
    ("nodes", "limit", "shares"),
    [
        ([4, 4], 0, [4, 4]),
        ([4, 4], 10, [4, 4]),
        ([64, 0, 64], 23, [10, 0, 10]),
        ([64, 3, 64], 22, [8, 3, 8]),
        ([5], 1, [0]),
        ([9, 9, 9], 3, [0, 0, 0]),
    ],
)
def test_shares(nodes, limit, shares):
    assert share_rows(nodes, limit) == shares


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_running": 0}, "max_running must be >= 1, got 0"),
        ({"max_stall_s": -1}, "max_stall_s must be >= 0, got -1"),
        ({"max_rows": 3, "max_running": 4}, "max_rows must be >= max_running, one row a sequence, or 0, got 3 and 4"),
        ({"request_timeout_s": -0.5}, "request_timeout_s must be >= 0"),
    ],
)
def test_limits_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"max_context": 100, **change})


def test_nothing_grows_with_time():
    engine, rng = engine_of(cache_bytes=MEMORY), np.random.default_rng(0)
    for _ in range(2):
        run_schedule(engine, mixed(30, rng, most_tokens=20), rng, cancel_share=0.05)
        assert not engine.has_work
        assert engine.memory.pages.num_free == engine.memory.pages.num_pages
        assert engine.memory.num_bytes == 0 and not engine.target.staged.keys() - set(range(180))
