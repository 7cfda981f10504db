"""The tree budget chosen each round by cost, for requests whose `tree_budget` is "auto" (docs/auto.md).

plan: draft at all, and how deep? buy: of the tree that was drafted, which nodes pay? learn: what did the round show of the
drafter's probabilities, of the costs, and of whether speculation pays for this request? The output never depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from ddtree.budget.buy import buy
from ddtree.budget.calibration import Calibration, Offset
from ddtree.budget.card import Card, acceptance_at, best_budget, row_for
from ddtree.budget.cost import CostModel
from ddtree.budget.depth import DepthProfile
from ddtree.budget.worth import Experience, Worth
from ddtree.engine.sequence import Sequence
from ddtree.engine.stats import StageClock
from ddtree.tree.build import Candidates
from ddtree.tree.draft_tree import DraftTree

LEAST_NODES = 8  # that a tree is built to before it is cut; room to grow, and candidates to learn from
PEAK_MEMORY = 0.9
RATE_MEMORY = 0.85  # of what a request's rounds brought at the going price
CARD_WEIGHT = 6
ENGINE_MEMORY = 0.98  # of the experience that new requests start from
OWN_SHARE = 0.5  # of what was accepted, against what was expected, in the experience of a round


@dataclass(eq=False)
class Regime:
    """What the engine has learnt about its drafter in greedy, or in sampled, requests."""

    calibration: Calibration
    experience: Experience
    rate: Experience  # of nodes bought at the going price; `experience` is of those bought at plain decoding's
    profile: DepthProfile
    peak: float
    num_rounds: int = 0

    def weigh(self, experience: Experience, rate: Experience) -> None:
        """One more round: the mean of all, the card counting as CARD_WEIGHT of them, and later of the recent ones."""
        self.num_rounds += 1
        share = max(1 - ENGINE_MEMORY, 1 / (CARD_WEIGHT + self.num_rounds))
        self.experience = self.experience.mixed(experience, share)
        self.rate = self.rate.mixed(rate, share)

    def open(self, cap: int) -> AutoState:
        return AutoState(self, Worth(self.experience), self.rate, self.profile.copy(), cap, self.peak)


@dataclass(eq=False)
class AutoState:
    """One request's part; a sequence carries it as `auto`. What is below `drafted` is of the round in flight."""

    regime: Regime
    worth: Worth
    rate: Experience
    profile: DepthProfile
    cap: int  # most nodes
    peak: float  # nodes lately bought, the most of them
    offset: Offset = field(default_factory=Offset)
    drafted: Candidates | None = None  # as the drafter ranked them
    probing: bool = False
    room: int | None = None  # nodes that memory and the forward have room for in this round; None: no limit
    offered: np.ndarray = field(default_factory=lambda: np.empty(0))  # probability of acceptance of each node drafted
    gains: np.ndarray = field(default_factory=lambda: np.empty(0))  # of the nodes bought
    depths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def wanted(self) -> int:
        """Nodes to build where there is room: more than were lately bought."""
        return min(self.cap, int(2 * self.peak) + LEAST_NODES)


class AutoBudget:
    """Plans, buys and learns for all sequences of an engine that ask for it; leaves the others alone."""

    def __init__(self, cost: CostModel, block_size: int, card: Card, max_budget: int, shrinkable: bool = False):
        self.cost, self.block_size, self.card, self.max_budget = cost, block_size, card, max_budget
        self.shrinkable = shrinkable  # whether the drafter may fill fewer slots than the block has
        self.regimes: dict[tuple[bool, bool], Regime] = {}  # by greedy and conditioned
        self._slots = 0  # block rows of the round in flight

    def describe(self) -> str:
        """What a round costs, in one line."""
        cost = self.cost
        rows = ", ".join(f"{count} {1000 * cost.verify.at(count):.1f}" for count in (1, 5, 17, 65) if count <= self.max_budget + 1)
        return f"ms of a verify by rows: {rows}; of a draft {1000 * cost.draft.at(self._num_slots(self.block_size)):.1f}"

    def open(self, sequence: Sequence) -> None:
        """Give a new sequence what is known so far."""
        sampling = sequence.request.sampling
        kind = (sampling.greedy, sequence.conditioned)
        if kind not in self.regimes:
            self.regimes[kind] = self._first_regime(sampling.temperature)
        sequence.auto = self.regimes[kind].open(self.max_budget)

    def plan(self, sequences: SequenceOf[Sequence]) -> None:
        """Before the draft: each sequence's `tree_budget`, 0 for a plain round, and `draft_depth`."""
        for sequence in sequences:
            state = sequence.auto
            if state is None:
                continue
            price = self._price(sequences, beside=sequence)
            wanted = sequence.num_remaining > 1 and state.room != 0 and state.worth.speculates(price)
            sequence.tree_budget = self._most_nodes(state, len(sequences)) if wanted else 0
            state.probing = bool(wanted) and state.worth.probing
            if wanted and self.shrinkable:
                draft_s, verify_s = self.cost.draft.upto(self.block_size), self.cost.verify.upto(state.cap + 1)
                sequence.draft_depth = state.profile.best_depth(draft_s, verify_s, self._price(sequences))

    def calibrate(
        self, sequences: SequenceOf[Sequence], candidates: SequenceOf[Candidates | None]
    ) -> list[Candidates | None]:
        """The drafters' candidates, their log-probabilities replaced by what they have proved to mean."""
        depths = [found.num_depths for found in candidates if found is not None]
        self._slots = len(depths) * self._num_slots(max(depths, default=0))
        return [self._believed(sequence.auto, found) for sequence, found in zip(sequences, candidates, strict=True)]

    def buy(self, sequences: SequenceOf[Sequence], trees: SequenceOf[DraftTree]) -> list[DraftTree]:
        """Cut each tree to the nodes that are worth their time; `tree_budget` becomes what is left."""
        offers = [s.auto is not None and tree.num_drafted > 0 for s, tree in zip(sequences, trees, strict=True)]
        if not any(offers):
            return list(trees)
        gains = [np.exp(tree.scores[1:].astype(np.float64)) for tree, offer in zip(trees, offers, strict=True) if offer]
        num_base = sum(1 if offer else tree.num_nodes for tree, offer in zip(trees, offers, strict=True))
        seconds = self.cost.verify.upto(num_base + sum(map(len, gains)))
        bought = iter(zip(gains, buy(gains, seconds, num_base, self._price(sequences)), strict=True))
        kept = []
        for sequence, tree, offer in zip(sequences, trees, offers, strict=True):
            if offer:
                worth, size = next(bought)
                tree, state = tree.first(size), sequence.auto
                state.offered, state.gains, state.depths = worth, worth[:size], tree.depths[1:]
                state.peak = max(size, PEAK_MEMORY * state.peak)
                sequence.tree_budget = size
            kept.append(tree)
        return kept

    def learn(self, sequences: SequenceOf[Sequence], rounds: SequenceOf, clock: StageClock) -> None:
        """After the round: costs from the stage clocks, calibration and worth from what was accepted."""
        num_rows = sum(each.tree.num_nodes for each in rounds)
        self.cost.observe(num_rows, clock.seconds["verify"], self._slots, clock.seconds["draft"])
        num_drafting = sum(s.auto is not None and s.auto.drafted is not None for s in sequences)
        for sequence, each in zip(sequences, rounds, strict=True):
            state = sequence.auto
            if state is None:
                continue
            self._count(sequence, len(sequences), num_rows)
            if state.drafted is None:
                state.worth.skip()
                continue
            self._learn_probabilities(state, each.acceptance.token_ids)
            luck = OWN_SHARE * (each.acceptance.acceptance_length - 1 - float(state.gains.sum()))
            price, beside = self._price(sequences), self._price(sequences, beside=sequence)
            extra = self._extra(state, len(sequences), num_drafting, price)
            least = self._extra(state, len(sequences), num_drafting, beside)
            state.rate = state.rate.mixed(extra.lucky(luck), 1 - RATE_MEMORY)
            state.worth.book(least.lucky(luck), beside)
            regime = state.regime
            regime.weigh(least.lucky(luck), extra.lucky(luck))
            state.profile.observe(state.depths, state.gains, state.drafted.num_depths)
            regime.profile, regime.peak = state.profile, state.peak
            state.drafted = None

    def _believed(self, state: AutoState | None, found: Candidates | None) -> Candidates | None:
        if state is None or found is None:
            return found
        num_depths = self.block_size - 1
        state.drafted = found.first(num_depths)
        state.offered, state.gains, state.depths = np.empty(0), np.empty(0), np.empty(0, np.int64)
        calibration, offset = state.regime.calibration, state.offset.value
        return state.drafted.believed(lambda log_probs, depths: calibration.reliability(log_probs, offset, depths))

    def _learn_probabilities(self, state: AutoState, target_tokens: np.ndarray) -> None:
        """`target_tokens [a]`: what the target chose at depths 1 ... a, the bonus token last."""
        calibration = state.regime.calibration
        seen = calibration.evidence(*state.drafted.along(target_tokens), state.offset.value)
        calibration.learn(seen)
        state.offset.learn(seen)

    def _count(self, sequence: Sequence, num_sequences: int, num_rows: int) -> None:
        """The decision and its inputs, for the request's stats."""
        stats, state, cost = sequence.stats, sequence.auto, self.cost
        tokens = 1.0 + (float(state.gains.sum()) if state.drafted is not None else 0.0)
        stats.probe_rounds += state.probing and state.drafted is not None
        stats.predicted_tokens += tokens
        stats.predicted_s += cost.scale * (cost.round_s(num_rows, self._slots) if self._slots else cost.plain_s(num_rows))
        stats.predicted_plain_s += cost.scale * tokens * cost.plain_s(num_sequences)
        stats.trust_offset = state.offset.value

    def _extra(self, state: AutoState, num_sequences: int, num_drafting: int, price: float) -> Experience:
        """What this sequence's draft brings and costs beside plain rounds of the others, its nodes bought at `price`.

        A purchase at another price than the round's is hypothetical: whether speculation pays at all must not be judged by
        trees that were cut for a time in which it pays much more.
        """
        cost, offered = self.cost, state.offered
        drafting = (cost.draft.at(self._slots) + cost.draft_rest_s - cost.plain_rest_s) / max(num_drafting, 1)
        seconds = cost.verify.upto(num_sequences + len(offered))
        (size,) = buy([offered], seconds, num_sequences, price)
        return Experience(float(offered[:size].sum()), drafting + seconds[num_sequences + size] - seconds[num_sequences])

    def _price(self, sequences: SequenceOf[Sequence], beside: Sequence | None = None) -> float:
        """Tokens per second of the engine in the long run, never less than plain decoding's: what a second is worth.
        With `beside`, as if that sequence were decoded plainly."""
        tokens, seconds = float(len(sequences)), self.cost.plain_s(len(sequences))
        plain = tokens / seconds
        for sequence in sequences:
            if sequence.auto is not None and sequence is not beside and sequence.auto.worth.speculating:
                rate = sequence.auto.rate
                tokens, seconds = tokens + rate.extra_tokens, seconds + rate.extra_s
        return max(plain, tokens / seconds)

    def _most_nodes(self, state: AutoState, num_sequences: int) -> int:
        """Nodes to build: room above what was lately bought, below what no acceptance could pay for."""
        wanted = state.wanted if state.room is None else min(state.wanted, state.room)
        verify_s = self.cost.verify.upto(num_sequences + wanted)
        ceiling = self.block_size * self.cost.plain_s(num_sequences)
        payable = int(np.searchsorted(verify_s, ceiling, side="right")) - 1 - num_sequences
        return max(min(wanted, payable), 1)

    def _num_slots(self, depth: int) -> int:
        """Block rows of one sequence that drafts to `depth`."""
        if not depth:
            return 0
        return min(depth + 1, self.block_size) if self.shrinkable else self.block_size

    def _first_regime(self, temperature: float) -> Regime:
        """From the drafter's card, before anything was seen."""
        num_depths, cost, row = self.block_size - 1, self.cost, row_for(self.card, temperature)

        def round_s(budget: int) -> float:
            return cost.round_s(1 + budget, self._num_slots(min(budget, num_depths)))

        budget = min(best_budget(row, round_s), self.max_budget)
        extra = min(acceptance_at(row, budget) - 1, num_depths * 0.95)
        return Regime(
            Calibration(num_depths),
            Experience(extra, round_s(budget) - cost.plain_s()),
            Experience(extra, round_s(budget) - cost.plain_s()),
            DepthProfile(num_depths, extra, budget),
            float(budget),
        )
