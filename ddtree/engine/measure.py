"""What rounds cost on this machine: timed at start-up, kept on disk, and checked cheaply at the next start.

One synthetic sequence serves all measurements; its budget changes between rounds, and the passes go through all budgets in
turn, so that a drift of the machine hits all alike.
"""

from __future__ import annotations

import logging
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import contextmanager

import torch

from ddtree.budget.card import Card
from ddtree.budget.cost import MEASURED_WEIGHT, CostModel, Curve
from ddtree.budget.store import CostStore
from ddtree.engine.auto import AutoBudget
from ddtree.engine.device_auto import DeviceAuto
from ddtree.engine.engine import Engine
from ddtree.engine.request import Request, Scoring
from ddtree.engine.sequence import Sequence

logger = logging.getLogger("ddtree")

PROBE_BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BETWEEN = (6, 12, 24, 48, 96, 192, 384, 768)  # once the others have been timed twice, if there is time
PASSES = 3
CHECK_BUDGET = 8
CHECK_ROUNDS = 3
TOLERANCE = 0.3  # in log seconds, of a stored ratio; what a busy machine does to a few rounds stays below it
HEADROOM = 1.5  # on the card's best acceptance length: rounds that even this could not pay for need no measuring
UNSTEADY = 1.3  # how far the passes of a quiet machine differ at most, the slowest from the fastest
UNSTEADY_WEIGHT = 3  # rounds that a measurement on a busy machine counts for
UNTIMED_ROW = 0.1  # of a plain step, for each row beyond the last that was timed, where the time did not suffice
SETTLING = 8  # beginnings before giving up
IN_FLIGHT = 2  # rounds over pools that may have been launched before the budget changed


class Bench:
    """A synthetic sequence whose rounds can be timed at any budget; begun anew when it comes to its end."""

    def __init__(self, engine: Engine, most_nodes: int, scoring: Scoring | None = None, chain: bool = False):
        self.engine, self.most_nodes, self.request_id = engine, most_nodes, -1
        self.scoring, self.chain = scoring, chain
        self._budget: int | None = None  # of the rounds in flight, over pools

    def settle(self, budget: int) -> Sequence:
        """The sequence, its next round one of at most `budget` nodes. Over pools the rounds that were launched ahead, with the
        last budget, are let go by. RuntimeError where the sequence ends with every one of them."""
        for _ in range(SETTLING):
            sequence = self.engine.running_or_none(self.request_id) or self._begin()
            sequence.tree_budget = min(budget, self.engine.config.max_tree_budget)
            if self.engine.device_rounds is None or self._budget == sequence.tree_budget:
                return sequence
            self._budget = sequence.tree_budget
            for _ in range(IN_FLIGHT):
                self.engine.step()
        raise RuntimeError(f"a context of {self.engine.config.max_context} tokens ends before a round can be timed: raise max_context")

    def round(self, budget: int) -> Timing:
        """One decode round with at most `budget` nodes."""
        stats = self.settle(budget).stats
        before = (stats.nodes_verified, stats.verify_s, stats.draft_s, stats.decode_s)
        self.engine.step()
        after = (stats.nodes_verified, stats.verify_s, stats.draft_s, stats.decode_s)
        nodes, verify_s, draft_s, total_s = (b - a for a, b in zip(before, after, strict=True))
        return Timing(1 + nodes, verify_s, draft_s, total_s)

    def close(self) -> None:
        self.engine.abort(self.request_id)

    def _begin(self) -> Sequence:
        """Prefill a prompt that leaves most of a short context for rounds."""
        engine, room = self.engine, self.engine.config.max_context
        prompt = tuple((7 * i + 3) % engine.vocab_size for i in range(max(min(64, room // 4), 1)))
        options = {"scoring": self.scoring, "chain": self.chain, "cache_salt": None}
        self.request_id = engine.add(Request(prompt, room - len(prompt), tree_budget=self.most_nodes, **options))
        self._budget = None
        while not (sequence := engine.running_or_none(self.request_id)) or not sequence.num_emitted:
            engine.step()
        return sequence


class Timing:
    """One round: rows verified, and seconds."""

    def __init__(self, num_rows: int, verify_s: float, draft_s: float, total_s: float):
        self.num_rows, self.verify_s, self.draft_s, self.total_s = num_rows, verify_s, draft_s, total_s

    @property
    def rest_s(self) -> float:
        return max(self.total_s - self.verify_s - self.draft_s, 0.0)


@contextmanager
def benching(engine: Engine, most_nodes: int, scoring: Scoring | None = None, chain: bool = False):
    """A Bench; the engine is idle again afterwards, and has learnt nothing from it."""
    auto, engine.auto = engine.auto, None
    bench = Bench(engine, most_nodes, scoring, chain)
    try:
        yield bench
    finally:
        bench.close()
        engine.auto = auto


def measure_rounds(
    engine: Engine,
    budgets: Iterable[int],
    passes: int = PASSES,
    limit_s: float = 30.0,
    clock=time.perf_counter,
    *,
    scoring: Scoring | None = None,
    chain: bool = False,
) -> dict[int, float]:
    """Median seconds of one decode round per budget, 0 included: a round of a request that never drafts.

    Every pass goes through all budgets; it ends after `limit_s`, with what has been timed by then.
    """
    times, deadline = defaultdict(list), clock() + limit_s
    for _ in range(passes):
        for some in ((0,), tuple(budgets)):
            with benching(engine, max(some), scoring, chain) as bench:
                bench.round(some[0])  # warms up
                for budget in some:
                    if times[0] and clock() > deadline:
                        break
                    bench.settle(budget)
                    started = clock()
                    bench.round(budget)
                    times[budget].append(clock() - started)
    return {budget: statistics.median(values) for budget, values in times.items() if values}


def measure_costs(
    engine: Engine, card: Card, limit_s: float = 8.0, passes: int = PASSES, clock=time.perf_counter
) -> tuple[CostModel, bool]:
    """A cost model from timed rounds, and whether it is worth keeping: all sizes timed, on a machine that held still."""
    deadline = clock() + limit_s
    limit = engine.config.max_tree_budget
    budgets = sorted({*(budget for budget in PROBE_BUDGETS if budget < limit), limit})
    most_accepted = HEADROOM * max(max(row.values()) for row in card.values())
    timings: dict[int, list[Timing]] = defaultdict(list)
    with benching(engine, max(budgets)) as bench:
        for budget in (0, budgets[0], 0):
            bench.round(budget)  # warm up
        whole = False  # one pass at least went through all budgets
        for number in range(passes):
            largest = budgets[-1]
            for budget in [0, *sorted({*budgets, *(b for b in BETWEEN if number > 1 and b < largest)})]:
                enough = len(timings) > 2 or number > 0
                if enough and clock() > deadline:
                    break
                timings[budget].append(bench.round(budget))
                if budget and timings[budget][0].total_s > most_accepted * timings[0][0].total_s:
                    budgets = [known for known in budgets if known <= budget]
                    break
            whole = whole or len(timings) > len(budgets)
    steady = is_steady(timings)
    if not whole or not steady:
        why = "the machine was busy" if whole else "the time did not suffice for rounds of all sizes"
        logger.info("%s while rounds were timed: costs are learnt on the way, and the next start measures again", why)
    most_rows = None if whole else 1 + limit
    return fitted(engine, timings, MEASURED_WEIGHT if steady else UNSTEADY_WEIGHT, most_rows), whole and steady


def is_steady(timings: dict[int, list[Timing]]) -> bool:
    """Whether the passes agree, half of the sizes at least. What was timed once proves nothing."""
    spreads = [max(t.total_s for t in found) / min(t.total_s for t in found) for found in timings.values() if len(found) > 1]
    return 2 * len(spreads) >= len(timings) and statistics.median(spreads) <= UNSTEADY


def fitted(engine: Engine, timings: dict[int, list[Timing]], weight: float, most_rows: int | None = None) -> CostModel:
    """The least of what was timed, by rows and by slots: whatever else a machine does only adds to it.

    `most_rows`: a count that was to be timed and was not; it gets a knot that is a guess, and dear.
    """
    verify, draft, plain, drafting = defaultdict(list), defaultdict(list), [], []
    for budget, found in timings.items():
        for timing in found:
            verify[timing.num_rows].append(timing.verify_s)
            if not budget:
                plain.append(timing.rest_s)
                continue
            draft[num_slots(engine, budget)].append(timing.draft_s)
            drafting.append(timing.rest_s)
    knots = {rows: max(min(seconds), 1e-9) for rows, seconds in verify.items()}
    if most_rows and most_rows > max(knots):
        # Two or three small sizes that happened to cost alike say nothing of a thousand rows: not free until seen.
        knots[most_rows] = max(knots.values()) + UNTIMED_ROW * knots[min(knots)] * (most_rows - max(knots))
    slots = {count: max(min(seconds), 1e-9) for count, seconds in draft.items()}
    buckets = tuple(getattr(engine.target, "row_buckets", ()))
    curves = Curve(knots, buckets, weight), Curve(slots, weight=weight)
    return CostModel(*curves, statistics.median(plain), statistics.median(drafting))


def num_slots(engine: Engine, budget: int) -> int:
    """Block rows that a pinned budget drafts."""
    if getattr(engine.drafter, "shrinkable_block", False):
        return min(budget + 1, engine.block_size)
    return engine.block_size


def still_holds(engine: Engine, cost: CostModel) -> bool:
    """A few rounds against a stored model: is the shape the same? Sets its scale to what the machine does now."""
    budget = min(CHECK_BUDGET, engine.config.max_tree_budget)
    plain, drafting = [], []
    with benching(engine, budget) as bench:
        for kind in (0, budget):
            bench.round(kind)
        for _ in range(CHECK_ROUNDS):
            plain.append(bench.round(0))
            drafting.append(bench.round(budget))
    plain_s = statistics.median(timing.total_s for timing in plain)
    round_s = statistics.median(timing.total_s for timing in drafting)
    known_s = cost.round_s(drafting[0].num_rows, num_slots(engine, budget))
    log = torch.tensor([plain_s / cost.plain_s(), round_s / known_s], dtype=torch.float64).log()
    cost.log_scale = float(log.mean())
    return abs(float(log[1] - log[0])) <= TOLERANCE


def start_auto(
    engine: Engine, card: Card, store: CostStore | None = None, names: dict[str, str] | None = None, limit_s: float = 8.0,
    drafter_card: Card | None = None, prepare: bool = True,
) -> AutoBudget | DeviceAuto:
    """Let the engine take requests of `tree_budget` "auto": with costs from the store if they still hold, else measured.
    An engine over pools measures its captured rounds; without `prepare` those of each number of requests when it first occurs.

    Args:
        card: mean acceptance lengths, temperature -> budget -> length.
        names: what else tells one measurement from another, such as the files of the model.
        drafter_card: the same of the drafter alone, where `card` is that of an adapter.
    """
    if engine.device_rounds is not None:
        auto = DeviceAuto(engine.device_rounds, card, engine.block_size, engine.config.max_tree_budget, drafter_card)
        engine.auto = engine.device_rounds.auto = auto
        if prepare:
            auto.prepare(engine.config.max_running, engine.config.prefill_chunk)
        return auto
    facts = facts_of(engine) | (names or {})
    cost = store.load(facts) if store else None
    if cost is not None and not still_holds(engine, cost):
        logger.info("rounds no longer cost what they did: measuring anew")
        cost = None
    if cost is None:
        cost, whole = measure_costs(engine, card, limit_s)
        if store and whole:
            store.save(facts, cost)
    shrinkable = bool(getattr(engine.drafter, "shrinkable_block", False))
    engine.auto = AutoBudget(cost, engine.block_size, card, engine.config.max_tree_budget, shrinkable)
    return engine.auto


def facts_of(engine: Engine) -> dict[str, object]:
    """What the costs of rounds depend on, beside the model's name."""
    model, device = getattr(engine.target, "model", None), getattr(engine.target, "device", torch.device("cpu"))
    on_gpu = device.type == "cuda"
    return {
        "machine": f"{platform.node()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
        "threads": 0 if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
        "block_size": engine.block_size,
        "scoring": engine.scoring,
        "max_tree_budget": engine.config.max_tree_budget,
        "batch_invariant": engine.config.batch_invariant,
        "parameters": sum(p.numel() for p in model.parameters()) if model is not None else 0,
    }
