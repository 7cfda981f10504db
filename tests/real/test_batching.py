"""The embedded pairs under random traffic: each request equals its solo result, with shared prefixes and little memory."""

from argparse import Namespace
from dataclasses import replace

import pytest

from ddtree.cli.loaded import load
from ddtree.engine.engine import Engine
from ddtree.engine.memory import cache_size
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from ddtree.sources import resolve
from ddtree.text import Tokenizer, render_chat
from tests.engine.schedules import SpoiltWatcher, check_courses, run_schedule, seeded

pytestmark = pytest.mark.real
SYSTEM = "You are a careful assistant who explains machines in plain words and short sentences, and who likes sums. " * 3
QUESTIONS = ("How does a loom work?", "What is 12 plus 30?", "Name three fruits.", "Why is the sky blue?", "Count to five.")
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.1),
    SamplingParams(presence_penalty=0.8, frequency_penalty=0.3),
)


class Traffic:
    """One embedded pair; requests of all kinds, and what each gets alone and plain."""

    def __init__(self, name: str):
        source = resolve(name)
        self.solo = load(Namespace(device="cpu", dtype="float32", max_context=1024), source)
        self.tokenizer = Tokenizer.load(source.target)
        self.expected: dict[Request, list[int]] = {}

    def engine(self, num_tokens: int, num_states: int = 8) -> Engine:
        """Memory for so many tokens, prefixes included."""
        solo, size = self.solo, cache_size(self.solo.target, self.solo.drafter)
        room = num_tokens * size.row_bytes + num_states * size.state_bytes
        limits = {"max_running": 8, "prefill_chunk": 64, "cache_bytes": room, "prefix_bytes": room // 2, "snapshot_every": 64}
        return Engine(solo.target, solo.drafter, replace(solo.config, **limits), solo.vocab_size)

    def request(self, rng, most_tokens: int) -> Request:
        messages = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.7 else []
        messages.append({"role": "user", "content": str(rng.choice(QUESTIONS))})
        thinking = [None, True, False][int(rng.integers(3))] if self.solo.target.model.config.is_hybrid else None
        rendered = render_chat(self.tokenizer, messages, enable_thinking=thinking)
        return Request(
            tuple(self.tokenizer.encode(rendered, add_special_tokens=False)),
            int(rng.integers(1, most_tokens)),
            SAMPLINGS[int(rng.integers(len(SAMPLINGS)))],
            seed=int(rng.integers(4)),
            tree_budget=int(rng.choice([0, 4, 16, 64])),
            eos_token_ids=frozenset(self.tokenizer.eos_token_ids),
        )

    def alone(self, request: Request) -> list[int]:
        request = replace(request, watcher=None, tree_budget=0)
        if request not in self.expected:
            self.expected[request] = list(self.solo.generate(request).token_ids)
        return self.expected[request]

    def run(self, seed: int, count: int, most_tokens: int, engine: Engine, num_spoilt: int = 2) -> list:
        rng = seeded(seed)
        requests = [self.request(rng, most_tokens) for _ in range(count)]
        for index in rng.choice(count, num_spoilt, replace=False):
            requests[index] = replace(requests[index], watcher=SpoiltWatcher(int(rng.integers(1, most_tokens))))
        courses = run_schedule(engine, requests, rng, cancel_share=0.05)
        check_courses(courses, self.alone)
        assert sum(course.finish_reason == "error" for course in courses) <= num_spoilt
        assert not engine.has_work
        return courses


@pytest.fixture(scope="module", params=["hybrid-tiny", "smollm2"])
def traffic(request, smollm2_path) -> Traffic:
    return Traffic(request.param)


def test_some_requests(traffic, caplog):
    courses = traffic.run(0, 6, 12, traffic.engine(1200), num_spoilt=1)
    assert "could not be remembered" not in caplog.text
    assert sum(course.stats.cached_tokens for course in courses if course.stats) > 0


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_tokens", [4000, 1100])
def test_many_requests(traffic, seed, num_tokens, caplog):
    """64 of them; with 1,100 tokens of memory some are preempted."""
    traffic.run(100 + seed, 64, 60, traffic.engine(num_tokens))
    assert "could not be remembered" not in caplog.text
