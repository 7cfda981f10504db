"""Many requests over pools: preemption that loses nothing, faults that stay with their request, rounds that stay on the device."""

from dataclasses import replace

import pytest

from ddtree.caches.pools import PageTable
from ddtree.engine.device_round import DeviceRound
from ddtree.engine.loading import share_out
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from tests.engine.pools import Pair, ask, check_pages, run_schedule, seeded, tokens
from tests.engine.schedules import SpoiltWatcher, check_courses


@pytest.fixture(scope="module", params=["hybrid", pytest.param("llama", marks=pytest.mark.long)])
def pair(request):
    return Pair(request.param)


def test_preemption_loses_nothing_and_spares_the_oldest(pair):
    """Mixed budgets, greedy and drawn, rounds on the device and with the host, in a third of the pages that they would like."""
    engine = pair.engine(num_tokens=128, max_context=300, max_running=5, prefix_bytes=0)
    requests = [
        ask(tokens(i, 20 + 30 * i), budget, 70, sampling=SamplingParams(temperature, top_p=top_p), seed=i)
        for i, (budget, temperature, top_p) in enumerate(
            [(8, 0.0, 1.0), (0, 0.0, 1.0), (16, 0.7, 1.0), (3, 0.7, 0.9), (8, 0.0, 1.0)]
        )
    ]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, pair.cold)
    assert [course.stats.output_tokens for course in courses] == [70] * 5
    assert courses[0].stats.preemptions == 0 < sum(course.stats.preemptions for course in courses)
    assert all(course.stats.cached_tokens == 0 for course in courses)
    check_pages(engine)


def test_one_alone_gets_what_there_is_with_smaller_trees(pair):
    engine = pair.engine(num_tokens=64, max_context=250, max_tree_budget=128, max_running=1, prefix_bytes=0)
    assert engine.memory.most_tokens < 250 + 129
    request = ask(tokens(1, 90), 128, 150)
    emission = engine.generate(request)
    assert list(emission.token_ids) == pair.cold(request) and emission.stats.preemptions == 0
    check_pages(engine)


def test_remembered_prefixes_go_before_anyone_is_preempted(pair):
    engine = pair.engine(num_tokens=320, max_context=300, max_running=2)
    for seed in range(3):
        engine.generate(ask(tokens(seed, 120), max_tokens=4))
    assert engine.prefix.num_pages >= 4
    requests = [ask(tokens(10 + i, 40), 8, 120) for i in range(2)]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, pair.cold)
    assert sum(course.stats.preemptions for course in courses) == 0
    engine.step()
    check_pages(engine)


def test_a_fault_of_one_watcher_takes_no_token_of_the_others(pair):
    """The rounds of all are one report; what was read of it before the fault counts."""
    engine = pair.engine(prefix_bytes=0)
    requests = [ask(tokens(20 + i, 30), 8, 40, seed=i) for i in range(4)]
    requests[2] = replace(requests[2], watcher=SpoiltWatcher(9))
    courses = run_schedule(engine, requests, seeded(1), join_share=1.0)
    check_courses(courses, lambda request: pair.cold(replace(request, watcher=None)))
    assert [course.finish_reason for course in courses] == ["length", "length", "error", "length"]
    engine.step()
    check_pages(engine)


def test_a_round_that_fails_is_computed_again_in_pages_of_its_own(pair):
    """Pages may be others' too, so a sequence that begins again must not write in those that it had."""
    engine, system = pair.engine(), tokens(30, 128)
    engine.generate(ask((*system, 1), boundaries=(128,)))
    requests = [ask((*system, 2 + i), 8, 30, seed=i, sampling=SamplingParams(frequency_penalty=0.2, temperature=0.5)) for i in range(3)]
    verify, failures = engine.target.verify, [3]

    def failing(sequences, trees):
        if len(sequences) == 3 and failures[0]:
            failures[0] -= 1
            raise RuntimeError("planted")
        return verify(sequences, trees)

    engine.target.verify = failing
    courses = run_schedule(engine, requests, seeded(2), join_share=1.0)
    check_courses(courses, pair.cold)
    assert failures == [0] and all(course.finish_reason == "length" for course in courses)
    engine.target.verify = verify
    again = run_schedule(engine, requests, seeded(2), join_share=1.0)
    check_courses(again, pair.cold)
    check_pages(engine)


@pytest.mark.parametrize("prefix_bytes", [pytest.param(0, marks=pytest.mark.long), 2**26])
def test_rounds_stay_on_the_device(pair, monkeypatch, prefix_bytes):
    """Growing page by page uploads page numbers and nothing else: every round but the first is launched without the host."""
    counts = {"launch": 0, "relaunch": 0, "give": 0}
    for cls, name in ((DeviceRound, "launch"), (DeviceRound, "relaunch"), (PageTable, "give")):
        original = getattr(cls, name)

        def counted(self, *args, _original=original, _name=name, **kwargs):
            counts[_name] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, counted)
    engine = pair.engine(prefix_bytes=prefix_bytes)
    request = ask(tokens(40, 30), 8, 170)
    emission = engine.generate(request)
    assert list(emission.token_ids) == pair.cold(request)
    assert counts["launch"] == 1, "all of the sequence's state was on the device"
    assert emission.stats.decode_rounds <= counts["relaunch"] <= emission.stats.decode_rounds + 1
    assert counts["give"] <= 1 + 210 // 64


def test_budgets_that_shrink_are_uploaded(pair):
    """A round may be launched again only as it was: with less room a tree must not write beyond its pages."""
    engine = pair.engine(prefix_bytes=0)
    request_id = engine.add(ask(tokens(41, 30), 16, 60))
    answer, nodes = [], set()
    while engine.has_work:
        sequence = engine.running_or_none(request_id)
        if sequence is not None and 20 < sequence.num_emitted < 40:
            sequence.tree_budget = 2
        for emission in engine.step():
            answer += emission.token_ids
            nodes.add(emission.round.num_drafted if emission.round else None)
    assert answer == pair.cold(ask(tokens(41, 30), 16, 60))
    assert 2 in nodes and 16 in nodes


def test_how_memory_is_shared_out():
    gib = 2**30
    assert share_out(1000, gib, 300, 0, 0) == (300, 0)
    assert share_out(1000, gib, 300, None, None) == (600, 300 * gib)
    assert share_out(400, gib, 300, None, None) == (400, 200 * gib)
    assert share_out(400, gib, 300, 100 * gib, None) == (100, 50 * gib)
    assert share_out(400, gib, 300, 100 * gib, 7 * gib) == (100, 7 * gib)
    with pytest.raises(ValueError, match="500.00 GiB of cache memory do not fit beside the weights: 400.00 GiB do"):
        share_out(400, gib, 300, 500 * gib, None)


def test_pools_that_do_not_hold_one_sequence_are_refused(pair):
    with pytest.raises(ValueError, match="the pools hold 256 tokens, max_context is 500"):
        pair.engine(num_tokens=64, max_context=500, max_running=1, max_tree_budget=16)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_with_faults(pair, seed):
    """As `test_paged_prefix.test_random_schedules`, with watchers that fail and no prefixes, in even fewer pages."""
    rng = seeded(seed)
    engine = pair.engine(num_tokens=64, max_context=250, max_running=6, prefill_chunk=32, prefix_bytes=0)
    requests = [
        Request(
            tokens(int(rng.integers(1000)), int(rng.integers(1, 150))),
            int(rng.integers(1, 100 if seed else 50)),
            SamplingParams(temperature=float(rng.choice([0.0, 0.8]))),
            seed=int(rng.integers(100)),
            tree_budget=int(rng.choice([0, 3, 16])),
            watcher=SpoiltWatcher(int(rng.integers(1, 30))) if rng.random() < 0.15 else None,
        )
        for _ in range(48 if seed else 10)
    ]
    courses = run_schedule(engine, requests, rng, cancel_share=0.03)
    check_courses(courses, lambda request: pair.cold(replace(request, watcher=None)))
    spoilt = [course for course in courses if course.finish_reason == "error"]
    assert all("spoilt watcher" in course.error for course in spoilt)
    engine.step()
    check_pages(engine)
