"""The tree budget chosen by cost for rounds that run whole on the device (docs/auto.md).

There a tree is built and verified before the host has seen it, and padding to a captured shape costs what nodes would. So the choice
is among a few budgets, before each round: the one of most tokens per second, by the measured times of the captured rounds
and by what the last trees promised. A tree's scores say what every smaller budget would have brought; what was accepted,
against what was promised, says how far to believe them.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from ddtree.budget.card import Card, acceptance_at, row_for
from ddtree.engine.belief import Belief, promises
from ddtree.engine.decode_round import Round
from ddtree.engine.device_round import RoundShape
from ddtree.engine.device_rounds import BATCHES, DeviceRounds
from ddtree.engine.graphs import bucket_of
from ddtree.engine.sequence import Sequence

LADDER = (0, 3, 7, 15, 31, 63, 127, 255)  # budgets to choose among: with the root their rows fill the kernels' tiles
MEMORY = 0.9  # of a request's rounds
ENGINE_MEMORY = 0.98  # of what new requests start from
STICKING = 1.02  # a change must promise 2 % more: launching another shape costs a little
PROBE_EVERY = 64  # plain rounds between looks at whether drafting would pay again
MOST_HEARD = 8  # trees that are learnt from per round
TIMED = 7  # replays per shape
SPARING = 8  # sequences in a batch from which on the adapter may be left out: its scores cost a sequence's share each
RECONSIDERED = 16  # rounds of large batches between two looks at whether it pays: a look costs the host something for each
REPLANNED = 8  # rounds for which the same large batch keeps its budget: its mean moves slowly, and the host has little time
COMPARED = 7  # tree budget at which the adapter's share of such a round is measured
COST_MEMORY = 0.9  # of a shape's time, per round of it


class DeviceAuto:
    """Plans the rounds of the sequences that leave their budget to the engine. Same methods as `AutoBudget`."""

    def __init__(
        self, rounds: DeviceRounds, card: Card, block_size: int, max_budget: int, drafter_card: Card | None = None
    ) -> None:
        """`card` as `start_auto` takes it; `drafter_card` says what the drafter reaches without the adapter, if it has one."""
        self.rounds, self.block_size = rounds, block_size
        self.cards = {True: card, False: drafter_card or card}
        self.ladder = [budget for budget in LADDER if budget <= max_budget]
        # Milliseconds at each budget of the ladder, by batch, sampling and scoring.
        self.costs: dict[tuple[int, bool, bool], np.ndarray] = {}
        self.regimes: dict[tuple[bool, bool], Belief] = {}  # by greedy and conditioned
        self.chosen = 0
        self.probing = False  # whether the last plan is to see whether drafting would pay again
        self.filtered: list[RoundShape] = []  # whose kernels are compiled once nobody waits
        self.turn = 0
        self.sparing = False  # whether the adapter was left out of the last large batch's rounds
        self.settled = 0  # rounds of large batches for which that stays
        self.choosing = False  # whether the last batch's scoring is ours to choose
        self.planned: SequenceOf[Sequence] = ()  # the last batch,
        self.kept = 0  # and rounds for which its plan stays

    def describe(self) -> str:
        """What a round costs, in one line."""
        costs = ", ".join(f"{b} {ms:.2f}" for b, ms in zip(self.ladder, self.costs_of(1, False), strict=False))
        return f"ms of a round by tree budget: {costs}"

    def prepare(self, max_running: int, prefill_chunk: int) -> None:
        """Capture and time what will be wanted: one sequence, greedy or drawing, and every number of greedy ones. What
        drawing adds in larger numbers follows from these; a shape of theirs is captured when it is first chosen."""
        batches, scored = BATCHES[: BATCHES.index(bucket_of(max_running, BATCHES)) + 1], self.rounds.state.conditioning is not None
        wanted = [(1, True, scored), *((count, False, scored) for count in batches)]
        spared = [(count, False, False) for count in batches if scored and count >= SPARING]
        shapes = [shape for key in wanted for shape in self._shapes(*key)] + [self._compared(*key[:2]) for key in spared]
        self.filtered = [replace(shape, filtered=True) for shape in self._shapes(1, True, scored)]
        self.rounds.compile_ahead(shapes, prefill_chunk)
        for key in wanted + spared:
            self.costs_of(*key)

    def prepare_one(self) -> bool:
        """While nobody waits: compile what a round that draws from what filters keep launches. Whether there was something to do."""
        if self.filtered:
            self.rounds.compile_ahead([self.filtered.pop()])  # no more at once: somebody may come
            return True
        return False

    def costs_of(self, num_sequences: int, sampled: bool, conditioned: bool | None = None) -> np.ndarray:
        """Milliseconds of a round at each budget that fits; measured or derived when first asked for. `conditioned` None: if it can be."""
        conditioned = self.rounds.state.conditioning is not None if conditioned is None else conditioned
        key = (bucket_of(num_sequences, BATCHES), sampled, conditioned)
        if key not in self.costs:
            scored = self.costs.get((*key[:2], True))
            greedy = self.costs.get((key[0], False, conditioned)) if sampled and key[0] > 1 else None
            if greedy is not None:
                # Each sequence draws as one alone does; every round of theirs corrects it.
                count = len(greedy)
                drawing = np.maximum(self.costs_of(1, True)[:count] - self.costs_of(1, False)[:count], 0.0)
                self.costs[key] = greedy + key[0] * drawing
            elif not conditioned and key[0] >= SPARING and scored is not None:
                # The adapter costs about the same at every budget, and a capture takes its time.
                plain_shape = self._compared(*key[:2])
                share = scored[self.ladder.index(plain_shape.max_budget)] - self._time(plain_shape)
                self.costs[key] = np.where(np.array(self.ladder[: len(scored)]) > 0, np.maximum(scored - share, scored[0]), scored)
            else:
                self.costs[key] = np.array([self._time(shape) for shape in self._shapes(*key)])
        return self.costs[key]

    def _shapes(self, num_sequences: int, sampled: bool, conditioned: bool) -> list[RoundShape]:
        """One for each budget of the ladder that fits."""
        most = max(self.rounds.state.max_rows, num_sequences)
        fitting = [budget for budget in self.ladder if num_sequences * (1 + budget) <= most]
        return [RoundShape(num_sequences, budget, sampled, conditioned and budget > 0) for budget in fitting]

    def _compared(self, num_sequences: int, sampled: bool) -> RoundShape:
        """The round at which the adapter's share is measured, without it."""
        fitting = self._shapes(num_sequences, sampled, False)
        return fitting[min(bisect_left(self.ladder, COMPARED), len(fitting) - 1)]

    def open(self, sequence: Sequence) -> None:
        """Give a new sequence what is known so far."""
        sequence.spared = self.sparing and may_be_spared(sequence)
        sequence.auto = replace(self._regime(sequence, sequence.conditioned and not sequence.spared), num_plain=0)

    def _regime(self, sequence: Sequence, scored: bool) -> Belief:
        """What is known of all requests of its kind whose trees are ranked so."""
        kind = (sequence.request.sampling.greedy, scored)
        if kind not in self.regimes:
            row = row_for(self.cards[scored], sequence.request.sampling.temperature)
            promised = [float(acceptance_at(row, budget) - 1) for budget in self.ladder]
            self.regimes[kind] = Belief(promised, promised[-1], promised[-1], wanted=self.ladder[-1])
        return self.regimes[kind]

    def _choose_scoring(self, sequences: SequenceOf[Sequence]) -> None:
        """Leave the adapter out of a large batch's rounds while its scores cost more than they bring. A belief follows by what
        trees of the one kind promise on average over those of the other."""
        drafting = [s for s in sequences if s.drafts]
        self.choosing = len(sequences) >= SPARING and bool(drafting) and all(s.auto is not None and may_be_spared(s) for s in drafting)
        if self.choosing:
            self.settled -= 1
            if self.settled < 0:
                rates = {sparing: self._rate(sequences, drafting, sparing) for sparing in (False, True)}
                self.sparing ^= rates[not self.sparing] > STICKING * rates[self.sparing]
                self.settled = RECONSIDERED - 1
            sparing = self.sparing
        else:
            sparing = False
        for sequence in drafting:
            if sequence.auto is not None and sequence.spared != sparing and sequence.conditioned:
                sequence.auto.promise(self._promised(sequence, sparing))
                sequence.spared = sparing

    def _rate(self, sequences: SequenceOf[Sequence], drafting: list[Sequence], sparing: bool) -> float:
        """Tokens per millisecond of the whole batch at the best budget, with the adapter or without."""
        sampled = any(not s.request.sampling.greedy for s in sequences)
        costs = self.costs_of(len(sequences), sampled, not sparing)
        beliefs = [replace(s.auto, promised=self._promised(s, sparing)) for s in drafting]
        tokens = self._tokens(beliefs, len(costs)) + len(sequences) - len(drafting)
        return float((tokens / costs).max())

    def _promised(self, sequence: Sequence, sparing: bool) -> list[float]:
        """What a sequence's trees would promise, were they ranked with the adapter or without."""
        promised = sequence.auto.promised
        if sequence.spared == sparing:
            return promised
        seen, asked = (self._regime(sequence, not spared).promised for spared in (sequence.spared, sparing))
        return [each * min(max(new / max(old, 1e-6), 0.5), 2.0) for each, old, new in zip(promised, seen, asked, strict=True)]

    def _tokens(self, beliefs: SequenceOf[Belief], count: int) -> np.ndarray:
        """Tokens that a round of these emits in all, at each of the first budgets of the ladder."""
        columns = zip(*(belief.tokens(self.block_size) for belief in beliefs), strict=True)
        return np.array([sum(column) for column in columns])[:count]

    def plan(self, sequences: SequenceOf[Sequence]) -> None:
        """One budget for all that ask, the one of most tokens per second of the whole batch; and the scoring of a large one."""
        if self._stays(sequences):
            return
        asking = [sequence for sequence in sequences if sequence.auto is not None]
        self.planned, self.kept, self.probing = sequences, REPLANNED - 1, False
        if not asking:
            return
        self._choose_scoring(sequences)
        costs = self._costs_for(sequences)
        tokens = self._tokens([sequence.auto for sequence in asking], len(costs))
        fixed = [sequence for sequence in sequences if sequence.auto is None]
        if fixed:
            # They take their part of the rows whatever is chosen here.
            floor = bisect_left(self.ladder[: len(costs) - 1], max(s.tree_budget for s in fixed))
            costs = np.maximum(costs, costs[floor])
            tokens = tokens + sum(s.stats.mean_acceptance_length or 1.0 for s in fixed)
        rates = tokens / costs
        best = int(rates.argmax())
        if self.chosen < len(rates) and rates[best] < STICKING * rates[self.chosen]:
            best = self.chosen
        self.chosen = best
        if best == 0 and len(costs) > 1 and min(s.auto.num_plain for s in asking) >= PROBE_EVERY:
            best, self.probing, self.kept = 1, True, 0
        budget = self.ladder[best]
        for sequence in asking:
            room = sequence.auto.room
            sequence.tree_budget = budget if room is None else min(budget, room)

    def _stays(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether a large batch, of the same sequences, goes on as planned."""
        if sequences is not self.planned or len(sequences) < SPARING or not self.kept or (self.choosing and not self.settled):
            return False
        if any(s.auto is not None and s.auto.room is not None and s.auto.room < s.tree_budget for s in sequences):
            return False
        self.kept -= 1
        self.settled -= self.choosing
        return True

    def launched(self, sequences: SequenceOf[Sequence]) -> bool:
        """The round as planned is on its way: whether it is a probe. Until that is read there is no other."""
        for sequence in sequences if self.probing else ():
            if sequence.auto is not None:
                sequence.auto.num_plain = 0
        return self.probing

    def calibrate(self, sequences, candidates):
        """The candidates as they are: belief is kept per tree here, not per token."""
        return candidates

    def buy(self, sequences, trees):
        """The trees as they are."""
        return trees

    def learn(self, sequences: SequenceOf[Sequence], rounds: SequenceOf[Round], clock) -> None:
        """After a round with the host in between."""
        self.observe(list(zip(sequences, rounds, strict=True)), probing=self.probing)

    def observe(self, results: list[tuple[Sequence, Round]], shape: RoundShape | None = None, probing: bool = False) -> None:
        """What a round's trees promised and what was accepted. `shape` that it ran in; None: as planned."""
        if all(sequence.auto is None for sequence, _ in results):
            return  # nothing is timed for those
        scored = None if shape is None else shape.conditioned
        keys = [] if shape is None else [(shape.num_sequences, shape.sampled, each) for each in (scored, not scored)]
        known = [self.costs[key] for key in keys if key in self.costs]  # a plain round was planned as either
        costs = (known[0] if known else self._costs_for([sequence for sequence, _ in results])).tolist()
        # With many sequences a tree of each tells more than the host has time to hear: some in turn are enough.
        stride = max(1, len(results) // MOST_HEARD)
        self.turn = (self.turn + 1) % stride
        heard, rungs, plain_ms = [], {}, costs[0]
        for place, (sequence, each) in enumerate(results):
            belief = sequence.auto
            if belief is None:
                continue
            num_drafted = each.num_drafted
            if num_drafted not in rungs:
                rungs[num_drafted] = min(bisect_left(self.ladder, num_drafted), len(costs) - 1)
            rung = rungs[num_drafted]
            stats, predicted = sequence.stats, belief.tokens(self.block_size)[rung]
            stats.predicted_tokens += predicted
            stats.predicted_s += costs[rung] / 1000
            stats.predicted_plain_s += predicted * plain_ms / 1000
            stats.probe_rounds += probing
            belief.num_plain = 0 if num_drafted else belief.num_plain + 1
            if num_drafted and place % stride == self.turn:
                planned = sequence.conditioned and not sequence.spared
                if scored in (None, planned):
                    heard.append((sequence, each, planned))
        if heard:
            self._hear(heard)

    def _hear(self, heard: list[tuple[Sequence, Round, bool]]) -> None:
        """Learn from the trees of some."""
        found = promises([each.seen.scores for _, each, _ in heard], self.ladder)
        for (sequence, each, planned), (promised, expected) in zip(heard, found, strict=True):
            for belief, memory in ((sequence.auto, MEMORY), (self._regime(sequence, planned), ENGINE_MEMORY)):
                belief.learn(promised, each.acceptance_length - 1, expected, memory)

    def timed(self, shape: RoundShape, seconds: float) -> None:
        """A round of this shape took so long on the device: what it costs now, contexts being what they are."""
        if shape.chain:
            return  # not among what is chosen from
        rung = bisect_left(self.ladder, shape.max_budget)
        for conditioned in (False, True):  # a plain round costs the same in both
            costs = self.costs.get((shape.num_sequences, shape.sampled, conditioned))
            known = costs is not None and rung < len(costs) and self.ladder[rung] == shape.max_budget
            if known and shape.conditioned == (conditioned and shape.max_budget > 0):
                costs[rung] += (1 - COST_MEMORY) * (1000 * seconds - costs[rung])

    def _costs_for(self, sequences: SequenceOf[Sequence]) -> np.ndarray:
        sampled = any(not s.request.sampling.greedy for s in sequences)
        drafting = [s for s in sequences if s.drafts]
        return self.costs_of(len(sequences), sampled, bool(drafting) and all(s.conditioned and not s.spared for s in drafting))

    def _time(self, shape: RoundShape) -> float:
        """Median milliseconds of a captured round on the device, all of its rows real, over the dummy slot."""
        captured, times, count = self.rounds.prepare(shape), [], shape.num_sequences
        slots, depth = [self.rounds.state.dummy] * count, captured.num_slots - 1
        with captured.set_aside():  # it may be flying
            lane = captured.launch(slots, [0] * count, [shape.max_budget] * count, [depth] * count)
            for number in range(TIMED + 2):
                lane.wait()
                if number >= 2:
                    times.append(1000 * sum(lane.marks.seconds().values()))
                lane = captured.relaunch()
            lane.wait()
        return statistics.median(times)


def may_be_spared(sequence: Sequence) -> bool:
    """Whether the adapter may be left out: it is there, and the request did not ask for it by name."""
    return sequence.conditioned and sequence.request.scoring is None
