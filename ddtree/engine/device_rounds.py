"""Which rounds run whole on the device, and keeping the device busy between them.

A round that needs nothing of the host is launched before the one in flight has been read, so the device never waits for
Python. The price is a round in vain when a request turns out to have ended: what it emits is dropped.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddtree.caches.pooled_rows import PREFILL, consecutive_rows
from ddtree.engine.decode_round import Round, settle
from ddtree.engine.device_round import DeviceRound, Lane, RoundShape
from ddtree.engine.graphs import bucket_of
from ddtree.engine.pooled_state import PooledState, SlotState
from ddtree.engine.round_report import Place, RoundReport
from ddtree.engine.sequence import Sequence
from ddtree.engine.stats import StageClock
from ddtree.kernels.compiling import compile_ahead
from ddtree.kernels.fused import argmax
from ddtree.models.adapter import PAIRWISE

if TYPE_CHECKING:
    from ddtree.engine.device_auto import DeviceAuto

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of sequences that a round is captured for
BUDGETS = (0, 2, 3, 4, 7, 8, 15, 16, 24, 31, 32, 48, 63, 64, 80, 96, 127, 128, 160, 192, 255, 256, 384, 512, 768, 1024)  # tree budgets


class Flight(NamedTuple):
    """A round that was launched and not yet read. Its list of sequences is the same one from round to round for as long as they
    are, so that what holds for all of them is looked up by it."""

    device_round: DeviceRound
    sequences: list[Sequence]
    states: list[SlotState]  # of theirs: whoever begins again has a new one, and takes nothing from this round
    budgets: list[int]
    rows: list[int]  # that each tree stages, its draft included
    probing: bool  # whether auto looks whether drafting would pay again
    lane: Lane

    def again(self, probing: bool) -> Flight:
        """The same round once more, for which all of the sequences' state is on the device already."""
        return self._replace(probing=probing, lane=self.device_round.relaunch())


class DeviceRounds:
    """Captured rounds by shape, and those in flight."""

    def __init__(self, state: PooledState, *, graphs: bool = True, round_type: type[DeviceRound] = DeviceRound) -> None:
        self.state, self.graphs, self.round_type = state, graphs, round_type
        self.runs_ahead = True  # off while an audit looks at what each round leaves behind
        self.auto: DeviceAuto | None = None  # plans the rounds of sequences that leave their budget to it
        self._rounds: dict[RoundShape, DeviceRound] = {}
        self._compiled: set[RoundShape] = set()
        self._flying: deque[Flight] = deque()  # oldest first
        self._suitable: SequenceOf[Sequence] = ()  # the last ones that were found so

    def takes(self, sequences: SequenceOf[Sequence], ahead: int = 0) -> bool:
        """Whether a round of these, `ahead` tokens from now, needs nothing of the host."""
        if sequences is not self._suitable:
            # A captured round builds chains or trees.
            if not all(map(suits, sequences)) or len({s.request.chain for s in sequences if s.drafts}) > 1:
                return False
            self._suitable = sequences
        if not self._within_drafter(sequences, ahead) or not self._fits(sequences):
            return False
        # Scores that sum whole paths up are asked for level by level.
        return self._scores_pairs or not any(s.conditioned and s.tree_budget for s in sequences)

    def run(self, sequences: SequenceOf[Sequence], clock: StageClock) -> list[tuple[Sequence, Round]]:
        """Finish the round in flight, or launch one for `sequences` and finish it; launch the next if nobody ends.

        `clock` gets the stages' times on the device.
        """
        if not self._flying:
            self._launch(list(sequences))
        flight = self._flying[0]
        present = [sequence.target_state for sequence in sequences]
        members = len(flight.states) == len(present) and all(map(operator.is_, flight.states, present))
        same = members and self.runs_ahead
        if same and len(self._flying) == 1:
            self._run_ahead(flight)
        report = flight.device_round.read(flight.lane.wait())
        self._flying.popleft()
        if same and not self._flying:
            self._go_on(flight, report.token_ids)
        # From here on the device is busy again, in the other lane.
        stages = flight.lane.marks.seconds()
        for stage, seconds in stages.items():
            clock.seconds[stage] += seconds
        if self.auto is not None:
            self.auto.timed(flight.device_round.shape, sum(stages.values()))
        # Of those that have left there may be nothing to read.
        places = [place for place, state in enumerate(flight.states) if members or state in present]
        results = [(flight.sequences[place], self._settle(flight, report, place)) for place in places]
        if self.auto is not None:
            self.auto.observe(results, flight.device_round.shape, flight.probing)
        return results

    def _settle(self, flight: Flight, report: RoundReport, place: int) -> Round:
        sequence, token_ids, num_drafted = flight.sequences[place], report.token_ids[place], report.num_drafted[place]
        scoring = "conditioned" if flight.device_round.shape.conditioned else "factorised"
        seen = Place(report, place, sequence.root_token)
        each = settle(sequence, token_ids, num_drafted, seen, scoring, flight.budgets[place])
        state = sequence.target_state
        # Where it goes on, the device has cut nothing either.
        whole = each.finish is None and each.fault is None
        state.exact = whole or len(each.token_ids) == self._kept_on_device(sequence, token_ids, each.finish is not None)
        sequence.token_ids.extend(each.token_ids)
        return each

    def _kept_on_device(self, sequence: Sequence, token_ids: list[int], ended: bool) -> int:
        """Tokens of this round that the slot has gone on by (`DeviceRound.cut`); -1 if a round in vain has taken it further."""
        stops = sequence.target_state.stops
        token_ids = token_ids[: sequence.num_remaining]
        stop = next((place for place, token_id in enumerate(token_ids, 1) if token_id in stops), None)
        if ended and stop is None and len(token_ids) < sequence.num_remaining and self._takes_part(sequence):
            return -1  # only the host saw an end
        return len(token_ids) if stop is None else stop

    def _takes_part(self, sequence: Sequence) -> bool:
        return any(sequence is each for flight in self._flying for each in flight.sequences)

    def drain(self, sequences: SequenceOf[Sequence] | None = None) -> None:
        """Forget the rounds in flight that any of these take part in (None: all), once they are done; what they emitted is
        lost, so only for sequences that leave or begin again."""
        left = deque()
        while self._flying:
            flight = self._flying.popleft()
            flight.lane.wait()
            if sequences is not None and not any(s in sequences for s in flight.sequences):
                left.append(flight)
        self._flying = left

    @property
    def _scores_pairs(self) -> bool:
        conditioning = self.state.conditioning
        return conditioning is None or conditioning.adapter.config.summary in PAIRWISE

    @property
    def flying(self) -> bool:
        return bool(self._flying)

    def prepare(self, shape: RoundShape) -> DeviceRound:
        """The captured round of this shape."""
        self.compile_ahead([shape])
        if shape not in self._rounds:
            self._rounds[shape] = self.round_type(self.state, shape, graphs=self.graphs)
        return self._rounds[shape]

    def compile_ahead(self, shapes: Iterable[RoundShape], prefill_chunk: int = 0) -> None:
        """Compile the kernels of rounds of all these shapes side by side, and of prefills of up to so many tokens; captures and
        requests then find them."""
        new = [shape for shape in dict.fromkeys(shapes) if shape not in self._compiled]
        self._compiled.update(new)
        lengths = sorted({prefill_chunk, *(1 << power for power in range(prefill_chunk.bit_length()))} - {0})
        rehearsals = [partial(self._rehearse, shape) for shape in new] + [partial(self._rehearse_prefill, n) for n in lengths]
        if rehearsals and self.state.device.type == "cuda":
            compile_ahead(rehearsals, self.state.device)

    def _rehearse(self, shape: RoundShape) -> None:
        """One round over the dummy slot, uncaptured."""
        self.round_type(self.state, shape, graphs=False).lanes[0].graph.replay()

    def _rehearse_prefill(self, num_tokens: int) -> None:
        """So many tokens of prompts into the dummy slot, and the last one's logits; kernels differ by powers of two at most."""
        state, device = self.state, self.state.device
        # Of several sequences where one may not be so long: the table of pages ends there.
        batch = -(-num_tokens // state.table.max_tokens)
        slots = torch.full((batch,), state.dummy, dtype=torch.int32, device=device)
        token_ids = torch.zeros(batch, -(-num_tokens // batch), dtype=torch.int64, device=device)
        features = None
        if state.drafter is not None:
            features = torch.zeros(token_ids.numel(), state.target.feature_width, dtype=state.features.dtype, device=device)
        hidden = state.target(consecutive_rows(PREFILL, token_ids, slots, state.table.context_lengths), features)
        argmax(state.target.logits(hidden[-1:]))
        if features is not None:
            state.drafter.absorb(features.view(*token_ids.shape, -1), slots, torch.zeros_like(slots))

    def shape_of(self, sequences: SequenceOf[Sequence]) -> RoundShape:
        """The least captured shape that holds a round of these."""
        most, drafting = max(budget_of(s) for s in sequences), [s for s in sequences if budget_of(s)]
        chain = any(s.request.chain for s in drafting)
        budget = most if chain else bucket_of(most, BUDGETS)  # a chain has few lengths: captured as long as it is
        return RoundShape(
            num_sequences=bucket_of(len(sequences), BATCHES),
            max_budget=budget,
            sampled=any(not s.request.sampling.greedy for s in sequences),
            conditioned=budget > 0 and ranks_conditioned(sequences),
            absorbs=any(s.drafts for s in sequences),
            chain=chain,
            filtered=any(s.request.sampling.filtered for s in sequences),
        )

    def _within_drafter(self, sequences: SequenceOf[Sequence], ahead: int) -> bool:
        # Past the context that the drafter was made for, the host decides.
        limit = self.state.drafter_context
        if limit is None:
            return True
        most = limit - ahead - self.state.block_size  # tokens that are committed
        return all(len(s.token_ids) <= most for s in sequences if s.drafts)

    def _fits(self, sequences: SequenceOf[Sequence]) -> bool:
        pinned = [s for s in sequences if s.auto is None]  # the others are planned to fit
        batch = bucket_of(len(sequences), BATCHES)
        budget = bucket_of(max((s.tree_budget for s in pinned if s.drafts), default=0), BUDGETS)
        return batch * (1 + budget) <= self.state.max_rows

    def _run_ahead(self, flight: Flight) -> None:
        """Launch the round after `flight` before that one's tokens are known, unless it could be in vain for sure."""
        most, sequences = flight.device_round.path_rows, flight.sequences
        if all(len(s.token_ids) < s.ends_at - 2 * most for s in sequences) and self.takes(sequences, ahead=2 * most):
            self._follow(flight, [most] * len(sequences), None)

    def _go_on(self, flight: Flight, emitted: list[list[int]]) -> None:
        """Launch the next round of the same sequences, if none may have ended; the host has not taken in their tokens yet."""
        sequences = flight.sequences
        if not any(map(may_end, sequences, emitted)) and self.takes(sequences):
            self._follow(flight, [len(token_ids) for token_ids in emitted], [token_ids[-1] for token_ids in emitted])

    def _follow(self, flight: Flight, ahead: list[int], roots: list[int] | None) -> None:
        """The round after `flight`, in which each sequence goes on by so many tokens at most, if their pages hold it. `roots`
        None: only the device knows them."""
        sequences, given = flight.sequences, self.state.table.rows_given
        if self.auto is not None:
            self.auto.plan(sequences)
        budgets = [budget_of(sequence) for sequence in sequences]
        device_round, same = flight.device_round, budgets == flight.budgets
        if same and self.auto is not None:  # it chooses the scoring too
            same = device_round.shape.conditioned == (device_round.shape.max_budget > 0 and ranks_conditioned(sequences))
        if not same:
            shape = self.shape_of(sequences)
            if roots is None and shape not in self._rounds:
                return  # a capture takes seconds: not while there is something to read
            device_round = self.prepare(shape)
        rows = flight.rows if same else rows_of(device_round, budgets)
        if any(len(s.token_ids) - 1 + more + n > given(s.target_state.slot) for s, more, n in zip(sequences, ahead, rows, strict=True)):
            return
        if same:
            self._flying.append(flight.again(self._launched(sequences)))
        else:
            self._upload(device_round, sequences, budgets, roots)

    def _launched(self, sequences: list[Sequence]) -> bool:
        """Whether the round that is launched now is one of auto's probes."""
        return self.auto is not None and self.auto.launched(sequences)

    def _launch(self, sequences: list[Sequence]) -> None:
        if self.auto is not None:
            self.auto.plan(sequences)
        budgets = [budget_of(sequence) for sequence in sequences]
        self._upload(self.prepare(self.shape_of(sequences)), sequences, budgets, [sequence.root_token for sequence in sequences])

    @torch.inference_mode()
    def _upload(self, device_round: DeviceRound, sequences: list[Sequence], budgets: list[int], roots: list[int] | None) -> None:
        states = [sequence.target_state for sequence in sequences]
        slots = [state.slot for state in states]
        depths = [min(budget, device_round.num_slots - 1) for budget in budgets]
        lane = device_round.launch(slots, roots, budgets, depths)
        rows = rows_of(device_round, budgets)
        self._flying.append(Flight(device_round, sequences, states, budgets, rows, self._launched(sequences), lane))


def rows_of(device_round: DeviceRound, budgets: list[int]) -> list[int]:
    """Rows that trees of so many nodes stage, their drafts included."""
    return [max(1 + budget, device_round.num_slots) if budget else 1 for budget in budgets]


def ranks_conditioned(sequences: SequenceOf[Sequence]) -> bool:
    """Whether a round of these is ranked by the adapter."""
    return all(s.conditioned and not s.spared for s in sequences if s.tree_budget)


def budget_of(sequence: Sequence) -> int:
    """Most nodes of its next tree."""
    return sequence.tree_budget if sequence.drafts else 0


def suits(sequence: Sequence) -> bool:
    """Whether choosing this sequence's tokens needs nothing of the host."""
    return sequence.adjuster is None and not sequence.suspect and sequence.request.num_logprobs is None


def may_end(sequence: Sequence, token_ids: list[int]) -> bool:
    """Whether these tokens could be the sequence's last; a stop string shows only later, and costs a round in vain."""
    request = sequence.request
    return len(token_ids) >= sequence.num_remaining or not (
        request.eos_token_ids.isdisjoint(token_ids) and request.stop_token_ids.isdisjoint(token_ids)
    )
