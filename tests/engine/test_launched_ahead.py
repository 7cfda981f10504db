"""Rounds that a device has not run yet while the host goes on: whatever the host does meanwhile, nobody's tokens change.

A CPU runs a round when it is launched, which hides what is read too early or written over. Here a round runs when somebody waits for it,
when something else is asked of the device, or when chance has it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from ddtree.engine.device_auto import DeviceAuto
from ddtree.engine.device_round import DeviceRound
from ddtree.models.conditioning import Conditioning
from ddtree.sampling.params import SamplingParams
from tests.engine.pools import Pair, ask, check_pages, seeded, tokens
from tests.engine.schedules import check_courses, run_schedule
from tests.engine.test_conditioned_rounds import adapter_for

GARBAGE = -(2**40)  # what a report says that is not there yet
MORE = [pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40)]
CARD = {"0": {"3": 2.0, "7": 3.0}, "0.7": {"3": 1.7, "7": 2.2}}


class Stream:
    """What was launched, in order; done when somebody waits for it."""

    def __init__(self, rng) -> None:
        self.rng, self.queue = rng, deque()

    def put(self, work) -> None:
        self.queue.append(work)
        for _ in range(self.rng.integers(0, len(self.queue) + 1) if self.rng.random() < 0.3 else 0):
            self.queue.popleft()()

    def finish(self, last=None) -> None:
        """All that was launched up to `last`; None: all."""
        while self.queue if last is None else last in self.queue:
            self.queue.popleft()()

    def precede(self, owner, *names: str) -> None:
        """Work that `owner` asks of the device comes after what was launched."""
        for name in names:
            method = getattr(owner, name)
            setattr(owner, name, lambda *given, method=method, **named: (self.finish(), method(*given, **named))[1])


class Queued:
    """A lane's graph, and the event of its last launch."""

    def __init__(self, stream: Stream, lane) -> None:
        self.stream, self.lane, self.graph, self.last = stream, lane, lane.graph, None

    def replay(self) -> None:
        self.last = lambda graph=self.graph: graph.replay()
        self.lane.host_report.fill_(GARBAGE)
        self.stream.put(self.last)

    def record(self) -> None: ...

    def synchronize(self) -> None:
        if self.last is not None:
            self.stream.finish(self.last)


def queued(stream: Stream) -> type[DeviceRound]:
    """A round whose launches wait in the stream."""

    class QueuedRound(DeviceRound):
        def __init__(self, *given, **named) -> None:
            stream.finish()
            super().__init__(*given, **named)
            for lane in self.lanes:
                lane.graph = lane.done = Queued(stream, lane)

        def launch(self, *given):
            stream.finish()  # its uploads come after what was launched
            return super().launch(*given)

    return QueuedRound


@pytest.fixture(scope="module", name="pairs")
def _pairs():
    pairs = {family: Pair(family) for family in ("hybrid", "llama")}
    plain = pairs["hybrid"].with_drafter_cold()
    pairs["adapter"] = Pair("hybrid")
    pairs["adapter"].conditioning = Conditioning(adapter_for(plain, "grandparent"), plain.target.model, tables=True)
    return pairs


def asynchronous(pair: Pair, rng, monkeypatch):
    """An engine over few pages whose device is slow, with a fickle auto; and the shapes that it launches ahead of their roots."""
    engine = pair.engine(
        num_tokens=int(rng.choice([64, 256])), max_context=220, max_running=int(rng.integers(2, 6)), prefix_bytes=int(rng.choice([0, 2**26])),
        conditioning=getattr(pair, "conditioning", None),
    )  # fmt: skip
    stream, rounds = Stream(rng), engine.device_rounds
    rounds.round_type = queued(stream)
    engine.target.prompts.pads = True
    stream.precede(engine.target, "open", "close", "verify", "commit")
    stream.precede(engine.target.prompts, "run")
    stream.precede(engine.drafter, "absorb", "absorb_together", "draft_blocks", "commit")
    stream.precede(rounds.state.table, "give", "take")
    if engine.prefix is not None:
        stream.precede(engine.prefix, "add", "restore")
    monkeypatch.setattr("ddtree.engine.device_auto.TIMED", 1)
    monkeypatch.setattr("ddtree.engine.device_auto.SPARING", 2)
    monkeypatch.setattr("ddtree.engine.device_auto.RECONSIDERED", 3)
    monkeypatch.setattr("ddtree.engine.device_auto.REPLANNED", 2)
    engine.auto = rounds.auto = DeviceAuto(rounds, CARD, engine.block_size, 16)
    ahead, upload, step = [], rounds._upload, engine.step

    def uploading(device_round, sequences, budgets, roots):
        if roots is None:
            ahead.append(device_round.shape)
        return upload(device_round, sequences, budgets, roots)

    def stepping():
        for costs in engine.auto.costs.values():
            costs[:] = rng.permutation(np.geomspace(1, 4, len(costs)))
        for sequence in engine.scheduler.running:
            if sequence.auto is None and sequence.stats.tree_budget and rng.random() < 0.3:
                sequence.tree_budget = int(rng.choice([0, 7, 15, 16]))
        return step()

    monkeypatch.setattr(rounds, "_upload", uploading)
    engine.step = stepping
    return engine, ahead


def requests_of(pair: Pair, rng, count: int):
    """Of all kinds; some end at a token in the middle of what they would say."""
    requests = []
    for number in range(count):
        sampled = rng.random() < 0.4
        sampling = SamplingParams(temperature=0.7 if sampled else 0.0, top_p=0.9 if sampled and rng.random() < 0.1 else 1.0)
        if rng.random() < 0.05:
            sampling = replace(sampling, presence_penalty=0.5)
        budget = ("auto", "auto", "auto", 0, 7, 15, 16)[rng.integers(7)]
        chain = budget != "auto" and rng.random() < 0.05
        prompt = tokens(int(rng.integers(6)), int(rng.integers(3, 70)))
        each = ask(prompt, budget, int(rng.integers(1, 130)), sampling=sampling, seed=number, chain=chain)
        if rng.random() < 0.4:
            said = pair.cold(each)
            each = replace(each, stop_token_ids=frozenset({said[rng.integers(len(said))]}))
        requests.append(each)
    return requests


@pytest.mark.parametrize("family", ["hybrid", "llama", pytest.param("adapter", marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", [0, *MORE])
def test_a_slow_device_changes_nobodys_tokens(pairs, family, seed, monkeypatch):
    pair, rng = pairs[family], seeded(seed)
    requests = requests_of(pair, rng, 7)
    engine, ahead = asynchronous(pair, rng, monkeypatch)
    courses = run_schedule(engine, requests, rng, cancel_share=0.02, join_share=float(rng.choice([0.1, 0.5])))
    check_courses(courses, pair.cold)
    assert ahead or seed, "launched while only the device knew its roots"
    engine.device_rounds.drain()
    check_pages(engine)
