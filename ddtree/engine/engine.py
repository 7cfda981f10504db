"""The engine: requests join, run a prefill chunk or a decode round per step, and leave. Token ids only."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ddtree.engine.auto import AutoBudget
from ddtree.engine.config import EngineConfig
from ddtree.engine.decode_round import Round, decode_round
from ddtree.engine.finish import Finish, scan
from ddtree.engine.request import AUTO, Emission, Request, RoundCount, RoundTrace, TreeBudget
from ddtree.engine.sequence import Sequence
from ddtree.engine.stats import StageClock
from ddtree.sampling.logprobs import TokenLogprob

if TYPE_CHECKING:
    from ddtree.engine.device_rounds import DeviceRounds

log = logging.getLogger(__name__)


class Engine:
    """Owned by one thread. `add` requests, then `step` while `has_work`."""

    def __init__(self, target, drafter, config: EngineConfig, vocab_size: int):
        self.target, self.drafter, self.config = target, drafter, config
        self.vocab_size = vocab_size
        self.auto: AutoBudget | None = None  # who chooses for requests of tree_budget "auto"
        self.device_rounds: DeviceRounds | None = None  # runs rounds that need nothing of the host; None without pools
        self._ids = itertools.count()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def has_drafter(self) -> bool:
        return self.drafter is not None

    @property
    def block_size(self) -> int | None:
        return self.drafter.block_size if self.drafter else None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def cache_use(self) -> float:
        """Committed tokens of what runs, over what it could hold: 0 to 1."""
        held = sum(sequence.context_length for sequence in list(self._running))
        return held / (self.config.max_context * self.config.max_running)

    def add(self, request: Request) -> int:
        """Queue a request; returns its id. Raises ValueError before anything runs."""
        self._check(request)
        budget, reason = self._effective_budget(request)
        sequence = Sequence(next(self._ids), request, tree_budget=self.config.max_tree_budget if budget == AUTO else budget)
        stats = sequence.stats
        stats.tree_budget, stats.block_size, stats.reason = budget, self.block_size, reason
        stats.mode = "ddtree" if budget and budget != AUTO else "target_only"
        self._waiting.append(sequence)
        return sequence.request_id

    def abort(self, request_id: int) -> None:
        """Free the request's place; nothing more is emitted for it. Unknown or finished ids are ignored."""
        for sequence in [s for s in (*self._waiting, *self._running) if s.request_id == request_id]:
            self._leave(sequence)

    def step(self) -> list[Emission]:
        """One prefill chunk if a request may join, else one decode round of everything that runs."""
        for sequence in list(self._running):
            if sequence.num_prefilled < len(sequence.request.prompt_token_ids):
                return self._contained([sequence], lambda s=sequence: self._prefill(s))
        if self._waiting and len(self._running) < self.config.max_running:
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            return self._contained([sequence], lambda: self._open(sequence))
        if self._running:
            return self._contained(list(self._running), self._decode)
        return []

    def running(self, request_id: int) -> Sequence:
        """The sequence of a request that runs, for measurements. KeyError if it does not."""
        sequence = self.running_or_none(request_id)
        if sequence is None:
            raise KeyError(request_id)
        return sequence

    def running_or_none(self, request_id: int) -> Sequence | None:
        """The sequence of a request while it runs."""
        return next((sequence for sequence in self._running if sequence.request_id == request_id), None)

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

    def _check(self, request: Request) -> None:
        prompt, limit = request.prompt_token_ids, self.config.max_context
        if not prompt:
            raise ValueError("prompt_token_ids must not be empty: give at least one token")
        wrong = next((t for t in prompt if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"prompt_token_ids must lie in 0 ... {self.vocab_size - 1}, got {wrong}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {request.max_tokens}")
        biased = next((t for t, _ in request.sampling.logit_bias if not 0 <= t < self.vocab_size), None)
        if biased is not None:
            raise ValueError(f"logit_bias: token ids lie in 0 ... {self.vocab_size - 1}, got {biased}")
        if request.tree_budget == AUTO:
            if self.drafter and not self.auto:
                raise ValueError('tree_budget "auto" needs measured costs: start_auto(engine, ...) first, or give an integer')
        elif isinstance(request.tree_budget, str):
            raise ValueError(f'tree_budget must be an integer or "auto", got {request.tree_budget!r}')
        elif request.tree_budget < 0:
            raise ValueError(f"tree_budget must be >= 0, got {request.tree_budget}")
        if len(prompt) + request.max_tokens > limit:
            raise ValueError(
                f"prompt of {len(prompt)} tokens and max_tokens {request.max_tokens} exceed the context of {limit} "
                "tokens: shorten the prompt or lower max_tokens"
            )

    def _effective_budget(self, request: Request) -> tuple[TreeBudget, str | None]:
        """The budget in force, and why it is not what was asked for."""
        limit = self.config.max_tree_budget
        if not request.tree_budget:
            return 0, None
        if not self.drafter:
            return 0, "no drafter is loaded"
        if self.block_size == 1:
            return 0, "the drafter's block size is 1: it drafts nothing"
        if request.tree_budget == AUTO:
            return AUTO, None
        if request.tree_budget > limit:
            return limit, f"tree_budget {request.tree_budget} was clamped to this server's maximum, {limit}"
        return request.tree_budget, None

    def _contained(self, sequences: list[Sequence], work) -> list[Emission]:
        """A fault takes only the requests that it happened in."""
        try:
            return work()
        except Exception as error:
            log.exception("requests %s failed", [sequence.request_id for sequence in sequences])
            for sequence in sequences:
                self._leave(sequence)
            message = f"{type(error).__name__}: {error}"
            return [Emission(s.request_id, (), "error", error=message, stats=s.stats) for s in sequences]

    def _open(self, sequence: Sequence) -> list[Emission]:
        self.target.open(sequence)
        if sequence.tree_budget:
            self.drafter.open(sequence)
        if sequence.stats.tree_budget == AUTO:
            self.auto.open(sequence)
        return self._prefill(sequence)

    def _prefill(self, sequence: Sequence) -> list[Emission]:
        started = time.perf_counter()
        prompt, first = sequence.request.prompt_token_ids, sequence.num_prefilled
        chunk = list(prompt[first : first + self.config.prefill_chunk])
        last = first + len(chunk) == len(prompt)
        features, token_id = self.target.prefill(sequence, chunk, last)
        if sequence.drafts:
            self.drafter.absorb(sequence, features)
        sequence.num_prefilled += len(chunk)
        stats = sequence.stats
        stats.prefill_s += time.perf_counter() - started
        if not last:
            return []
        stats.ttft_s = time.perf_counter() - sequence.submitted_at
        finish = scan([token_id], sequence.request, num_before=0)
        sequence.token_ids.append(token_id)
        stats.output_tokens = 1
        return [self._emit(sequence, (token_id,), finish)]

    def _decode(self) -> list[Emission]:
        clock, sequences = StageClock(), list(self._running)
        started = time.perf_counter()
        rounds = self._rounds(sequences, clock)
        elapsed = time.perf_counter() - started
        emissions = []
        for sequence, each in rounds:
            record(sequence, each, clock, elapsed)
            trace = traced(sequence, each, clock, elapsed) if sequence.request.trace else None
            emission = self._emit(sequence, tuple(each.kept.token_ids.tolist()), each.finish, trace)
            count = RoundCount(each.tree.num_drafted, each.acceptance.acceptance_length)
            emissions.append(replace(emission, round=count))
        return emissions

    def _rounds(self, sequences: list[Sequence], clock: StageClock) -> list[tuple[Sequence, Round]]:
        """One round of each, on the device alone where nothing of it needs the host (there one stage, verify)."""
        device = self.device_rounds
        if device is not None and (device.flying or device.takes(sequences)):
            with clock("verify"):
                return device.run(sequences)
        return list(zip(sequences, decode_round(self.drafter, self.target, sequences, clock, self.auto), strict=True))

    def _emit(
        self, sequence: Sequence, token_ids: tuple[int, ...], finish: Finish | None, trace: RoundTrace | None = None
    ) -> Emission:
        logprobs, sequence.logprobs = tuple(sequence.logprobs), []
        if finish is None:
            return Emission(sequence.request_id, token_ids, logprobs=logprobs, trace=trace)
        self._leave(sequence)
        return Emission(
            sequence.request_id,
            token_ids,
            finish.finish_reason,
            finish.stop_reason,
            logprobs=logprobs,
            stats=sequence.stats,
            trace=trace,
        )

    def _leave(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self.target.close(sequence)
            if self.drafter:
                self.drafter.close(sequence)


def record(sequence: Sequence, each: Round, clock: StageClock, elapsed: float) -> None:
    """Book one round in the request's stats. Stage times are those of the whole round, shared or not."""
    stats = sequence.stats
    stats.decode_rounds += 1
    stats.plain_rounds += each.tree.num_drafted == 0
    stats.nodes_verified += each.tree.num_drafted
    if sequence.auto is not None and each.tree.num_drafted:
        stats.mode = "chain" if stats.mode != "ddtree" and each.tree.is_chain else "ddtree"
    stats.acceptance_histogram[each.acceptance.acceptance_length] += 1
    stats.trimmed_tokens += each.acceptance.acceptance_length - each.kept.acceptance_length
    stats.output_tokens += each.kept.acceptance_length
    stats.decode_s += elapsed
    for stage, seconds in clock.seconds.items():
        name = f"{stage}_s"
        setattr(stats, name, getattr(stats, name) + seconds)
    wanted = sequence.drafts and sequence.tree_budget > 0
    if wanted and each.tree.num_drafted == 0 and each.finish is None and stats.reason is None:
        stats.reason = "past the drafter's own context limit: plain decoding took over"


def traced(sequence: Sequence, each: Round, clock: StageClock, elapsed: float) -> RoundTrace:
    """The round as a trace, once it is booked and committed."""
    context_length = sequence.context_length - each.kept.acceptance_length
    return RoundTrace(
        sequence.stats.decode_rounds, context_length, each.tree, each.acceptance, dict(clock.seconds), elapsed
    )
