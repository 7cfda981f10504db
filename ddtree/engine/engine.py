"""The engine: requests join, run prefill chunks and decode rounds in turns, and leave. Token ids only."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddtree.engine.admission import check, effective_budget
from ddtree.engine.auto import AutoBudget
from ddtree.engine.book import record, traced
from ddtree.engine.config import EngineConfig
from ddtree.engine.decode_round import CommitFailed, Round, decode_round
from ddtree.engine.finish import Finish, scan
from ddtree.engine.memory import Memory, is_out_of_memory, memory_for
from ddtree.engine.prefill import prefill_step
from ddtree.engine.prefix import PrefixCache
from ddtree.engine.recall import AnyPrefix, remember
from ddtree.engine.request import AUTO, Emission, Request, RoundCount, RoundTrace, Scoring
from ddtree.engine.room import limited
from ddtree.engine.scheduler import Scheduler
from ddtree.engine.sequence import Sequence
from ddtree.engine.stats import StageClock
from ddtree.sampling.logprobs import TokenLogprob

if TYPE_CHECKING:
    from ddtree.engine.device_rounds import DeviceRounds

log = logging.getLogger(__name__)


class Engine:
    """Owned by one thread. `add` requests, then `step` while `has_work`."""

    def __init__(
        self, target, drafter, config: EngineConfig, vocab_size: int, *, memory: Memory | None = None, prefix: AnyPrefix = None
    ):
        """`memory` and `prefix`: those of pools; by default what `config` says, over a buffer for each sequence."""
        self.target, self.drafter = target, drafter
        self.vocab_size = vocab_size
        self.auto: AutoBudget | None = None  # who chooses for requests of tree_budget "auto"
        self.device_rounds: DeviceRounds | None = None  # runs rounds that need nothing of the host; None without pools
        self.memory, self.prefix = memory, prefix
        if memory is None:
            if config.batch_invariant:
                raise ValueError("batch_invariant needs an engine over pools (pooled_engine), this one is without: leave it out")
            self.memory = memory_for(target, drafter, config)
            self.prefix = PrefixCache(config.prefix_bytes, self.memory) if config.prefix_bytes else None
        self.scheduler = Scheduler(config, self.memory, self.prefix, self.block_size or 0)
        self._ids = itertools.count()
        self._decoded_last = False

    @property
    def config(self) -> EngineConfig:
        return self.scheduler.config

    @config.setter
    def config(self, config: EngineConfig) -> None:
        """Other limits, but for those of memory, which is shared out already."""
        self.scheduler.config = config

    @property
    def has_drafter(self) -> bool:
        return self.drafter is not None

    @property
    def block_size(self) -> int | None:
        return self.drafter.block_size if self.drafter else None

    @property
    def scoring(self) -> Scoring | None:
        """How drafts are ranked where a request does not say; None without a drafter."""
        if self.drafter is None:
            return None
        return "factorised" if getattr(self.drafter, "conditioning", None) is None else "conditioned"

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def cache_use(self) -> float:
        """Share of the cache memory that running sequences hold, 0 to 1; without a limit their tokens over what
        `max_running` of the longest would have."""
        running = list(self.scheduler.running)
        if self.memory is not None:
            return self.memory.num_pages_of(running) / self.memory.pages.num_pages
        return sum(sequence.context_length for sequence in running) / (self.config.max_context * self.config.max_running)

    def memory_facts(self) -> dict[str, int]:
        """Bytes of cache memory for /stats: the limit, what is held, and what of that remembered prefixes hold."""
        facts = {}
        if self.memory is not None:
            facts |= {"cache_limit_bytes": self.memory.limit_bytes, "cache_used_bytes": self.memory.num_bytes}
        return facts | ({"prefix_bytes": self.prefix.num_bytes} if self.prefix is not None else {})

    def add(self, request: Request) -> int:
        """Queue a request; returns its id. Raises ValueError before anything runs."""
        has_auto = self.drafter is None or self.auto is not None
        check(request, self.config, self.vocab_size, has_auto, has_adapter=self.scoring == "conditioned")
        budget, reason = effective_budget(request, self.config, self.block_size)
        sequence = Sequence(next(self._ids), request, tree_budget=self.config.max_tree_budget if budget == AUTO else budget)
        stats = sequence.stats
        stats.tree_budget, stats.block_size, stats.reason = budget, self.block_size, reason
        stats.mode = "target_only" if not budget or budget == AUTO else "chain" if request.chain else "ddtree"
        sequence.conditioned = bool(budget) and (request.scoring or self.scoring) == "conditioned"
        self.scheduler.queue(sequence)
        return sequence.request_id

    def abort(self, request_id: int) -> None:
        """Free the request's place; nothing more is emitted for it. Unknown or finished ids are ignored."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self._leave(sequence)

    def step(self) -> list[Emission]:
        """Let requests join that fit, then prefill a chunk or decode a round of everything that has a root: in turns,
        so that those that decode wait for one chunk at most."""
        emissions = self._expire()
        while (sequence := self.scheduler.admit()) is not None:
            emissions += self._contained(sequence, self._open)
            if sequence in self.scheduler.waiting:
                break  # it found no place after all
        decoding = bool(self.scheduler.decoding)
        if self.scheduler.has_prefill and (self._decoded_last or not decoding):
            self._decoded_last = False
            return emissions + self._prefill()
        if decoding:
            self._decoded_last = True
            return emissions + self._decode()
        return emissions

    def prepare_one(self) -> bool:
        """While nobody waits: do one thing, a fraction of a second, that a later request would wait for. False where nothing is left."""
        return any(getattr(each, "prepare_one", bool)() for each in (self.auto, self.target))

    def running(self, request_id: int) -> Sequence:
        """The sequence of a request that runs, for measurements. KeyError if it does not."""
        sequence = self.running_or_none(request_id)
        if sequence is None:
            raise KeyError(request_id)
        return sequence

    def running_or_none(self, request_id: int) -> Sequence | None:
        """The sequence of a request while it runs."""
        return next((sequence for sequence in self.scheduler.running if sequence.request_id == request_id), None)

    def generate(self, request: Request) -> Emission:
        """Run one request to its end, alone; all its tokens in one emission. Raises RuntimeError on a fault."""
        request_id = self.add(request)
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        while True:
            for emission in self.step():
                if emission.request_id != request_id:
                    continue
                token_ids.extend(emission.token_ids)
                logprobs.extend(emission.logprobs)
                if emission.finish_reason == "error":
                    raise RuntimeError(emission.error)
                if emission.finish_reason:
                    return replace(emission, token_ids=tuple(token_ids), logprobs=tuple(logprobs))

    def _expire(self) -> list[Emission]:
        """End what has waited, or run, for longer than it may."""
        config, emissions = self.config, []
        if not (config.request_timeout_s or config.queue_timeout_s):
            return emissions
        now = time.perf_counter()
        for sequence in [*self.scheduler.waiting, *self.scheduler.running]:
            age = now - sequence.submitted_at
            queued = sequence in self.scheduler.waiting and not sequence.stats.preemptions
            if queued and config.queue_timeout_s and age > config.queue_timeout_s:
                error = f"the request waited for {age:.1f} s, the limit is {config.queue_timeout_s:g} s: try again later"
                emissions.append(self._end(sequence, error, "queue_timeout"))
            elif config.request_timeout_s and age > config.request_timeout_s:
                error = f"the request took {age:.1f} s, the limit is {config.request_timeout_s:g} s: ask for fewer tokens"
                emissions.append(self._end(sequence, error, "timeout"))
        return emissions

    def _contained(self, sequence: Sequence, work) -> list[Emission]:
        """A fault takes only the request that it happened in."""
        try:
            return work(sequence)
        except Exception as error:
            return [self._fail(sequence, error)]

    def _fail(self, sequence: Sequence, error: Exception) -> Emission:
        log.error("request %d failed", sequence.request_id, exc_info=error)
        return self._end(sequence, f"{type(error).__name__}: {error}")

    def _end(self, sequence: Sequence, error: str, code: str | None = None) -> Emission:
        self._leave(sequence)
        return Emission(sequence.request_id, (), "error", error=error, error_code=code, stats=sequence.stats)

    def _open(self, sequence: Sequence) -> list[Emission]:
        try:
            self.target.open(sequence)
            if sequence.stats.tree_budget:
                self.drafter.open(sequence)
        except MemoryError:
            if self.num_running == 1:
                raise
            self._close(sequence)
            self.scheduler.remove(sequence)
            self.scheduler.queue(sequence)
            return []
        if sequence.stats.tree_budget == AUTO and sequence.auto is None:
            self.auto.open(sequence)
        self._reserve([sequence])
        return []

    def _close(self, sequence: Sequence) -> None:
        """Drop what its tokens have become; they stay, and can be computed again."""
        self.target.close(sequence)
        if self.drafter:
            self.drafter.close(sequence)
        sequence.num_prefilled, sequence.prefilling, sequence.boundaries, sequence.logprobs = 0, True, [], []

    def _reserve(self, sequences: SequenceOf[Sequence]) -> None:
        """Buffers as large as the pages that the sequences hold."""
        if self.memory is None:
            return
        for sequence in sequences:
            self.memory.reserve(sequence)

    def _prefill(self) -> list[Emission]:
        """A step's prompt tokens; the first token of each answer that begins."""
        emissions, shared = [], []
        for each in prefill_step(self.target, self.drafter, self.scheduler, self.prefix):
            if each.fault is not None and each.alone:
                emissions.append(self._fail(each.sequence, each.fault))
            elif each.fault is not None:
                shared.append(each)
            else:
                each.sequence.prefilling = False
                if each.token_id is not None:
                    emissions += self._contained(each.sequence, partial(self._begin, token_id=each.token_id))
        if shared:
            emissions += self._begin_again([each.sequence for each in shared], "prefill", shared[0].fault)
        return emissions

    def _begin(self, sequence: Sequence, token_id: int) -> list[Emission]:
        sequence.stats.ttft_s = time.perf_counter() - sequence.submitted_at
        finish = scan([token_id], sequence.request, num_before=0)
        sequence.token_ids.append(token_id)
        sequence.stats.output_tokens = 1
        return [self._emit(sequence, (token_id,), finish)]

    def _decode(self) -> list[Emission]:
        """One round of everything that has a root; of those whose last round failed, each by itself."""
        room = self.scheduler.make_room(self._close)
        sequences, emissions = self.scheduler.decoding, []
        self._reserve(sequences)
        with limited(sequences, room):
            for group in [[s] for s in sequences if s.suspect] + [[s for s in sequences if not s.suspect]]:
                emissions += self._round(group) if group else []
        return emissions

    def _round(self, sequences: list[Sequence]) -> list[Emission]:
        clock, started, failure = StageClock(), time.perf_counter(), None
        again = sequences[0].suspect  # then it is alone
        try:
            rounds = self._rounds(sequences, clock)
        except CommitFailed as error:
            # What was accepted is decided, and watchers have read it: keep it, and compute the caches again.
            failure, rounds = error, list(zip(sequences, error.rounds, strict=True))
        except Exception as error:
            failure, rounds = error, []
        elapsed = time.perf_counter() - started
        emissions = [self._conclude(sequence, each, clock, elapsed) for sequence, each in rounds]
        if failure is None:
            return emissions
        left = [sequence for sequence in sequences if sequence in self.scheduler.running]
        return emissions + self._contain(left, failure, again)

    def _rounds(self, sequences: list[Sequence], clock: StageClock) -> list[tuple[Sequence, Round]]:
        """One round of each, on the device alone where nothing of it needs the host."""
        device = self.device_rounds
        if device is not None and not sequences[0].suspect and (device.flying or device.takes(sequences)):
            return device.run(sequences, clock)
        return list(zip(sequences, decode_round(self.drafter, self.target, sequences, clock, self.auto), strict=True))

    def _conclude(self, sequence: Sequence, each: Round, clock: StageClock, elapsed: float) -> Emission:
        """Book and emit what a round brought."""
        if each.fault is not None:
            return self._fail(sequence, each.fault)
        sequence.suspect = False
        record(sequence, each, clock, elapsed)
        trace = traced(sequence, each, clock, elapsed) if sequence.request.trace else None
        return self._emit(sequence, tuple(each.token_ids), each.finish, trace, RoundCount(each.num_drafted, each.acceptance_length))

    def _contain(self, sequences: list[Sequence], error: Exception, again: bool) -> list[Emission]:
        """A round of these failed. Alone, a sequence ends; of several nobody knows whose fault it was, so all are computed
        again from their tokens, and the next round of each is its own. Too little memory asks for smaller trees first."""
        num_rows = sum(1 + sequence.tree_budget for sequence in sequences)
        smaller = is_out_of_memory(error) and num_rows > len(sequences)
        if smaller:
            self.scheduler.note_out_of_memory(num_rows, len(sequences))
        # A commit that fails leaves emitted tokens behind, so that one may be tried again without repeating itself.
        if len(sequences) == 1 and not smaller and (again or not isinstance(error, CommitFailed)):
            return [self._fail(sequences[0], error)]
        return self._begin_again(sequences, "round", error)

    def _begin_again(self, sequences: list[Sequence], what: str, error: Exception) -> list[Emission]:
        """Compute these anew from their tokens after a fault that any of them may have caused; each by itself."""
        log.error("a %s of requests %s failed", what, [s.request_id for s in sequences], exc_info=error)
        if self.device_rounds is not None:
            self.device_rounds.drain(sequences)
        emissions = []
        for sequence in sequences:
            self._close(sequence)
            sequence.suspect = True
            if self.memory is not None and self.memory.shares:
                self.scheduler.preempt(sequence)  # others may read its pages: it begins again with new ones
            else:
                emissions += self._contained(sequence, self._open)
        return emissions

    def _emit(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        finish: Finish | None,
        trace: RoundTrace | None = None,
        count: RoundCount | None = None,
    ) -> Emission:
        logprobs = ()
        if sequence.logprobs:
            logprobs, sequence.logprobs = tuple(sequence.logprobs), []
        if finish is None:
            return Emission(sequence.request_id, token_ids, logprobs=logprobs, trace=trace, round=count)
        remember(self.prefix, sequence, self.drafter)
        self._leave(sequence)
        return Emission(
            sequence.request_id,
            token_ids,
            finish.finish_reason,
            finish.stop_reason,
            logprobs=logprobs,
            stats=sequence.stats,
            trace=trace,
            round=count,
        )

    def _leave(self, sequence: Sequence) -> None:
        if sequence in self.scheduler.running:
            self._close(sequence)
        self.scheduler.remove(sequence)
