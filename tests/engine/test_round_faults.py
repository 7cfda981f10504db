"""Faults in rounds of many requests: whom they end, and what too little memory or time does."""

from dataclasses import replace

import pytest

from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from tests.engine.batches import PROMPT, engine_of, expected
from tests.engine.schedules import SpoiltWatcher, check_courses, run_schedule, seeded
from tests.engine.test_decode_round import alone


def test_a_request_whose_rounds_fail_ends_alone():
    engine = engine_of()
    engine.target.poison = 11
    requests = [Request((i, 0, 2), 40, tree_budget=8) for i in (1, 2, 11, 4, 5)]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, expected)
    assert [course.finish_reason for course in courses] == ["length", "length", "error", "length", "length"]
    assert "scripted poison" in courses[2].error


def test_a_spoilt_watcher_ends_its_own_request_alone():
    engine = engine_of()
    requests = [Request((i, 0, 2), 40, tree_budget=8) for i in range(4)]
    requests[1] = replace(requests[1], watcher=SpoiltWatcher(7))
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, expected)
    assert [course.finish_reason for course in courses] == ["length", "error", "length", "length"]
    assert len([entry for entry in engine.target.log if entry[0] == "prefill"]) == 4, "nobody was computed again"


@pytest.mark.parametrize("times", [1, 3])
def test_a_commit_that_fails_halfway_loses_and_repeats_nothing(times):
    engine = engine_of()
    engine.target.spoil_commits = times
    requests = [Request((i, 0, 2), 40, SamplingParams(temperature=0.5), tree_budget=8) for i in range(4)]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, expected)
    assert all(course.finish_reason == "length" for course in courses)


def test_a_commit_that_always_fails_ends_its_request():
    engine = engine_of()
    engine.add(Request(PROMPT, 40, tree_budget=8))

    def commit(sequences, paths):
        raise RuntimeError("never")

    engine.target.commit = commit
    emissions = []
    while engine.has_work:
        emissions += engine.step()
        assert len(emissions) < 20
    assert emissions[-1].finish_reason == "error" and "a commit failed" in emissions[-1].error
    written = [token for emission in emissions for token in emission.token_ids]
    assert written == alone(Request(PROMPT, 40))[: len(written)]


def test_too_little_memory_makes_trees_smaller_and_ends_nobody():
    engine = engine_of()
    engine.target.most_rows = 20
    requests = [Request((i, 0, 2), 60, tree_budget=32) for i in range(6)]
    courses = run_schedule(engine, requests, seeded(0), join_share=1.0)
    check_courses(courses, expected)
    assert all(course.finish_reason == "length" for course in courses)


def test_no_place_in_the_pools_means_waiting():
    engine = engine_of()
    opened, open_ = [], engine.target.open

    def open_few(sequence):
        if len(engine.scheduler.running) > 2:
            raise MemoryError("every slot of the pools is taken")
        open_(sequence)
        opened.append(sequence.request_id)

    engine.target.open = open_few
    courses = run_schedule(engine, [Request((i, 0, 2), 20, tree_budget=8) for i in range(6)], seeded(0), join_share=1.0)
    check_courses(courses, expected)
    assert opened == list(range(6)), "in order of arrival"


def test_time_limits(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr("ddtree.engine.engine.time", clock)
    engine = engine_of(max_running=1, request_timeout_s=60, queue_timeout_s=10)
    running, waiting = engine.add(Request(PROMPT, 300)), engine.add(Request(PROMPT, 10))
    for sequence in engine.scheduler.waiting:
        sequence.submitted_at = 0.0
    engine.step()
    clock.now = 11.0
    (ended, *_) = engine.step()
    assert (ended.request_id, ended.finish_reason, ended.error_code) == (waiting, "error", "queue_timeout")
    assert "waited for 11.0 s, the limit is 10 s" in ended.error
    clock.now = 61.0
    (ended, *_) = engine.step()
    assert (ended.request_id, ended.error_code) == (running, "timeout") and not engine.has_work
    assert ended.stats.output_tokens > 0
