"""Who runs, who prefills, who waits: admission by what fits, first come first served, preemption that loses nothing.

Knows lengths and pages, no model. Order of arrival is order of service: nobody overtakes in the queue, and whoever came
last is the first to give memory back. The oldest running sequence is never preempted, so everything ends.
"""

from __future__ import annotations

from collections.abc import Callable

from ddtree.engine.config import EngineConfig
from ddtree.engine.memory import Memory
from ddtree.engine.recall import AnyPrefix
from ddtree.engine.room import share_rows
from ddtree.engine.sequence import Sequence

LEAST_CHUNK = 16  # prompt tokens beside decoding, however slow they are
MOST_SLOWER = 4  # times what a prompt token took of late, that one chunk is believed


class Scheduler:
    """The queue and the running sequences of one engine."""

    def __init__(self, config: EngineConfig, memory: Memory | None, prefix: AnyPrefix, block_size: int) -> None:
        """`block_size`: rows that a draft stages; 0 without a drafter."""
        self.config, self.memory, self.prefix, self.block_size = config, memory, prefix, block_size
        self.waiting: list[Sequence] = []  # by arrival; a preempted sequence is back in its old place
        self.running: list[Sequence] = []  # by admission
        self.rows_limit: int | None = None  # of a verify forward, lower than the config's once memory did not suffice
        self._prefill_token_s = 0.0  # seconds per prompt token, of late
        self._oldest_first = False

    @property
    def decoding(self) -> list[Sequence]:
        """Running sequences that have a root."""
        return [sequence for sequence in self.running if not sequence.prefilling]

    @property
    def has_prefill(self) -> bool:
        return any(sequence.prefilling for sequence in self.running)

    def find(self, request_id: int) -> Sequence | None:
        """The sequence of a request that has not left."""
        return next((s for s in (*self.running, *self.waiting) if s.request_id == request_id), None)

    def queue(self, sequence: Sequence) -> None:
        """Let it wait, in order of arrival."""
        place = sum(other.request_id < sequence.request_id for other in self.waiting)
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """It is gone; its pages are free."""
        for line in (self.waiting, self.running):
            if sequence in line:
                line.remove(sequence)
        if self.memory is not None:
            self.memory.release(sequence)

    def admit(self) -> Sequence | None:
        """The first in the queue, if it fits beside what runs; it runs now, and its pages are held."""
        if not self.waiting or len(self.running) >= self.config.max_running:
            return None
        sequence = self.waiting[0]
        if self.memory is not None and not self._admissible(sequence):
            return None
        self.running.append(self.waiting.pop(0))
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Take its memory; it waits in its old place, to be computed again from its tokens."""
        self.remove(sequence)
        sequence.stats.preemptions += 1
        self.queue(sequence)

    def make_room(self, close: Callable[[Sequence], None]) -> list[int]:
        """Before a round: memory for every decoding sequence, oldest first -> most nodes of each that is left.

        Trees shrink first, then remembered prefixes go, then whoever came last: `close` it.
        """
        room = []
        sequences = self.decoding
        while len(room) < len(sequences):
            sequence = sequences[len(room)]
            nodes = self._room(sequence)
            if nodes is not None:
                room.append(nodes)
                continue
            youngest = self.running[-1]
            assert youngest is not self.running[0], "one sequence alone always fits"
            close(youngest)
            self.preempt(youngest)
            sequences = self.decoding
        return share_rows(room, self._rows_limit(len(room)))

    def prefill_line(self) -> list[Sequence]:
        """Prefilling sequences in the order in which they are served: in turns whoever has least left, so that short
        prompts need not wait for long ones, and the oldest, so that long ones do not starve."""
        line = sorted((s for s in self.running if s.prefilling), key=lambda s: len(s.prefill_ids) - s.num_prefilled)
        self._oldest_first = not self._oldest_first
        if self._oldest_first:
            line.sort(key=lambda s: s.request_id)
        return line

    def chunk_tokens(self) -> int:
        """Prompt tokens of this step."""
        config = self.config
        if not config.max_stall_s or not self._prefill_token_s or not self.decoding:
            return config.prefill_chunk
        wanted = int(config.max_stall_s / self._prefill_token_s)
        return max(min(wanted, config.prefill_chunk), min(LEAST_CHUNK, config.prefill_chunk))

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """What a chunk took."""
        each, known = seconds / num_tokens, self._prefill_token_s
        # What a forward takes to be compiled or captured it takes once.
        self._prefill_token_s = 0.7 * known + 0.3 * min(each, MOST_SLOWER * known) if known else each

    def note_out_of_memory(self, num_rows: int, num_sequences: int) -> None:
        """A forward over `num_rows` rows did not fit into memory: from now on fewer, but one for each sequence."""
        self.rows_limit = max(num_rows // 2, num_sequences)

    def _admissible(self, sequence: Sequence) -> bool:
        """Hold what it needs to begin with, beside what it may be lent; nothing of both if that does not fit."""
        if self.prefix is not None:
            self.prefix.lend(sequence)
        fits = self._begins(sequence)
        if not fits:
            self.memory.release(sequence)
        return fits

    def _begins(self, sequence: Sequence) -> bool:
        """Hold what it needs to begin with, if what runs keeps a page each to grow by."""
        memory, tokens = self.memory, len(sequence.token_ids)
        wanted, least = tokens + self._staged(sequence.most_nodes), tokens + 1
        spare = len(self.running)
        if not spare:
            # Alone it gets what there is, and trees that fit into that.
            return self._hold(sequence, wanted) or self._hold(sequence, least)
        forgettable = self.prefix.num_pages if self.prefix is not None else 0
        if memory.missing(sequence, wanted) + spare > memory.pages.num_free + forgettable:
            return False
        return self._hold(sequence, wanted)

    def _staged(self, nodes: int) -> int:
        """Rows that a round of so many drafted nodes stages behind the committed ones."""
        return max(1 + nodes, self.block_size) if nodes else 1

    def _room(self, sequence: Sequence) -> int | None:
        """Nodes that the sequence's next round has memory for; None if not even its root has."""
        wanted = sequence.most_nodes
        if self.memory is None:
            return wanted
        committed, ahead = sequence.context_length, self.memory.rows_ahead
        staged = self._staged(wanted)
        if committed + staged + ahead <= self.memory.rows_held(sequence):
            return wanted  # as in most rounds
        if self._hold(sequence, committed + staged + ahead) or self._hold(sequence, committed + staged):
            return wanted
        if not self._hold(sequence, committed + 1):
            return None
        staged = self.memory.rows_held(sequence) - committed
        return min(wanted, staged - 1) if staged >= self.block_size else 0

    def _hold(self, sequence: Sequence, num_rows: int) -> bool:
        memory = self.memory
        lacking = memory.missing(sequence, num_rows) - memory.pages.num_free
        if lacking > 0:
            if self.prefix is None or self.prefix.num_pages < lacking:
                return False
            self.prefix.free_pages(lacking)
        return memory.hold(sequence, num_rows)

    def _rows_limit(self, num_sequences: int) -> int:
        limits = [limit for limit in (self.config.max_rows, self.rows_limit) if limit]
        return max(min(limits, default=0), num_sequences) if limits else 0
