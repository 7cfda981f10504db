"""Microseconds of host time per sequence and round, of rounds that run whole on the device (`engine.device_rounds`).

The engine, its sequences and its reports are real, over tiny random models; a round itself costs nothing: it draws one of a few
reports prepared beforehand (trees of a declared acceptance) and declares what it would have taken on a device, with a few per
cent of noise. So what is left of a step is Python, and its CPU time is printed, not the wall's. `changes` counts the steps
that launched another shape than the one before; `idle` is what passed between a report and the next launch where nothing had
been launched ahead. A device adds the launches themselves. No GPU; the last line is JSON.

    python -m benchmarks.host_round --sequences 8,32,64
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from benchmarks.synthetic import ACCURACIES
from ddtree.doctor.hybrid import VOCAB, random_hybrid
from ddtree.engine.config import EngineConfig
from ddtree.engine.device_round import DeviceRound, Lane
from ddtree.engine.device_rounds import DeviceRounds
from ddtree.engine.measure import start_auto
from ddtree.engine.pooled import pooled_engine
from ddtree.engine.request import Request
from ddtree.tree.accept import accept
from ddtree.tree.build import Candidates, build_ddtree

MODES = (0, 8, "auto")
VARIANTS = 16  # reports prepared per shape
PROMPT_TOKENS = 8
CARD = {"0.0": {"4": 2.5, "16": 3.3, "64": 3.9}}


def declared_ms(shape) -> float:
    """A round of SmolLM2's pair on an H200, roughly: a drafter's pass, and rows that begin to count from a few hundred on."""
    rows = shape.num_sequences * shape.rows_each
    return 0.6 + 0.3 * min(shape.max_budget, 1) + 0.0025 * rows


class FreeRound(DeviceRound):
    """Reports from a drawer; `spent` seconds went into handing them out."""

    spent, noise = 0.0, 0.03

    def __init__(self, state, shape, **kind) -> None:
        self._drawer, self._random = None, np.random.default_rng(shape.max_budget)
        super().__init__(state, shape, **kind)

    def run(self, mark) -> None:
        started = time.thread_time()
        if self._drawer is None:
            self._drawer = [self._draw() for _ in range(VARIANTS)]
        self.report.copy_(self._drawer[self._random.integers(VARIANTS)])
        took = declared_ms(self.shape) / 1000 * (1 + self.noise * self._random.standard_normal())
        for index in range(len(mark._times)):
            mark._times[index] = took * index / (len(mark._times) - 1)
        FreeRound.spent += time.thread_time() - started

    def _draw(self) -> torch.Tensor:
        """A report [B, ...] as a device would have left it."""
        report = torch.zeros_like(self.report)
        for row in report:
            if not self.shape.max_budget:
                row[:2] = torch.tensor([1, int(self._random.integers(VOCAB))])
                continue
            tree, acceptance = self._round()
            length, paths = acceptance.acceptance_length, self.path_rows
            row[0] = length
            row[1 : 1 + length] = torch.from_numpy(acceptance.token_ids)
            row[1 + paths : 1 + paths + length] = torch.from_numpy(acceptance.path)
            row[1 + 2 * paths] = tree.num_nodes
            arrays = row[2 + 2 * paths :].view(4, -1)
            for place, array in zip(arrays, (tree.token_ids, tree.parents, tree.depths, tree.scores.view(np.int32)), strict=True):
                place[: tree.num_nodes] = torch.from_numpy(np.ascontiguousarray(array))
        return report

    def _round(self):
        """A tree of a text that is harder or easier than declared, and what of it was right."""
        depths, width = self.num_slots - 1, min(self.shape.max_budget, VOCAB)
        accuracies = np.clip(np.array(ACCURACIES[:depths]) + self._random.uniform(-0.3, 0.1), 0.05, 0.95)[:, None]
        log_probs = np.log(accuracies) + np.arange(width) * np.log(1 - accuracies)
        token_ids = np.tile(np.arange(width), (depths, 1))
        tree = build_ddtree(1, Candidates(token_ids, log_probs.astype(np.float32)), self.shape.max_budget)
        ranks = self._random.geometric(accuracies[np.minimum(tree.depths, depths - 1), 0]) - 1
        return tree, accept(tree, ranks % VOCAB)


def engine_of(num_sequences: int, max_tree_budget: int):
    """Tiny models, rounds that cost nothing."""
    tiny = random_hybrid("cpu", torch.float32)
    config = EngineConfig(max_context=4096, max_tree_budget=max_tree_budget, max_running=num_sequences, prefill_chunk=PROMPT_TOKENS * num_sequences)
    engine = pooled_engine(tiny.target.model, tiny.drafter.model, config, max_rows=64 * num_sequences)
    engine.device_rounds = DeviceRounds(engine.device_rounds.state, round_type=FreeRound)
    return engine


class Watch:
    """When the engine launched which shape, and when a report came while nothing was in flight: the device idles from then on."""

    def __init__(self) -> None:
        self.shapes, self.idle_s, self._since = [], 0.0, None

    def hook(self, engine) -> None:
        rounds, relaunch = engine.device_rounds, FreeRound.relaunch

        def launched(this):
            if self._since is not None:
                self.idle_s += time.thread_time() - self._since
                self._since = None
            self.shapes.append(this.shape)
            lane = relaunch(this)
            wait = Lane.wait.__get__(lane)

            def waited():
                report = wait()
                self._since = time.thread_time() if len(rounds._flying) == 1 else None
                return report

            lane.wait = waited
            return lane

        rounds.round_type = type("WatchedRound", (FreeRound,), {"relaunch": launched})


def measure(num_sequences: int, mode, num_rounds: int) -> dict:
    """CPU time of `num_rounds` rounds of so many requests, after as many to warm up."""
    engine, watch = engine_of(num_sequences, 64), Watch()
    watch.hook(engine)
    if mode == "auto":
        start_auto(engine, CARD)
    generator = np.random.default_rng(0)
    for index in range(num_sequences):
        prompt = tuple(generator.integers(0, VOCAB - 1, PROMPT_TOKENS).tolist())
        engine.add(Request(prompt, 4000, tree_budget=mode, seed=index, eos_token_ids=frozenset({VOCAB + 1})))
    while any(s.prefilling for s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    times, changes, nodes, idle = [], 0, 0, 0.0
    for number in range(2 * num_rounds):
        first, spent, before, started = len(watch.shapes), FreeRound.spent, watch.idle_s, time.thread_time()
        emissions = engine.step()
        elapsed = time.thread_time() - started - (FreeRound.spent - spent)
        assert len(emissions) == num_sequences, "a request ended"
        if number >= num_rounds:
            times.append(elapsed)
            idle += watch.idle_s - before
            nodes += sum(each.round.num_drafted for each in emissions)
            changes += len(set(watch.shapes[max(first - 1, 0) :])) - 1
    least = statistics.quantiles(times, n=10)[0]  # another process on the core only adds
    return {
        "us_per_sequence": 1e6 * least / num_sequences,
        "ms_per_round": 1000 * least,
        "idle_us_per_round": 1e6 * idle / num_rounds,
        "changes": changes,
        "nodes": nodes / num_rounds / num_sequences,
    }


LINE = (
    "{sequences:4d} {mode!s:>5}: {us_per_sequence:6.1f} us a sequence, {ms_per_round:6.3f} ms a round, idle {idle_us_per_round:5.0f} us, "
    "{changes} changes of shape, {nodes:.1f} nodes"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=lambda text: [int(each) for each in text.split(",")], default=[8, 32, 64])
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for count in args.sequences:
        for mode in MODES:
            rows.append({"sequences": count, "mode": mode, **measure(count, mode, args.rounds)})
            print(LINE.format(**rows[-1]), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
