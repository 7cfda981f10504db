"""Prefill: the prompt tokens of an engine step, of several sequences in one forward where the target packs them.

A short prompt's forward costs what reading the weights costs, or a GPU's launches: side by side many pay that once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from ddtree.engine.recall import AnyPrefix, recall, remember_prefilled
from ddtree.engine.scheduler import Scheduler
from ddtree.engine.sequence import Sequence

WAITED_FOR = 128  # tokens in common with a prompt that is computed now, from which on waiting to take them over is cheaper


class Chunk(NamedTuple):
    """Consecutive prompt tokens of a sequence, the next ones to be committed."""

    sequence: Sequence
    token_ids: list[int]
    last: bool  # whether the answer's first token is wanted after them


class Prefilled(NamedTuple):
    """A sequence whose prompt is committed, or that failed on the way."""

    sequence: Sequence
    token_id: int | None = None  # the answer's first; None where it had one
    fault: Exception | None = None
    alone: bool = True  # whether the fault can only be its own


def prefill_step(target, drafter, scheduler: Scheduler, prefix: AnyPrefix) -> list[Prefilled]:
    """As many prompt tokens as a step may take: of one sequence, and of others that come to their end with it. Returns those
    that need no more, or cannot have it."""
    started, left, line = time.perf_counter(), scheduler.chunk_tokens(), scheduler.prefill_line()
    done, num_tokens, packs = [], 0, getattr(target, "packs_prompts", False)
    while line and left - num_tokens > 0:
        lacking = len(line[0].prefill_ids) - known_of(line[0], prefix)
        if num_tokens and lacking > left - num_tokens:
            break
        group = first_group(line, left - num_tokens - lacking, prefix) if packs else line[:1]
        line = [sequence for sequence in line if sequence not in group]
        num_tokens += _run(target, drafter, scheduler, prefix, group, left - num_tokens, done)
    if num_tokens:
        scheduler.note_prefill(num_tokens, time.perf_counter() - started)
    return done


def first_group(line: SequenceOf[Sequence], left: int, prefix: AnyPrefix) -> list[Sequence]:
    """The first of the line and those that go along with it: what they lack is no more than the tokens `left` beside it, no fault
    is suspected in them, and nobody computes meanwhile what they could take over."""
    group = [line[0]]
    if line[0].suspect:
        return group
    for sequence in line[1:]:
        known = known_of(sequence, prefix)
        lacking = len(sequence.prefill_ids) - known
        if lacking > left:
            break
        if not sequence.suspect and not _waits(sequence, known, group, prefix):
            group.append(sequence)
            left -= lacking
    return group


def known_of(sequence: Sequence, prefix: AnyPrefix) -> int:
    """Of the tokens that it needs, those that are committed or can be taken over."""
    if sequence.num_prefilled or prefix is None or not prefix.remembers(sequence):
        return sequence.num_prefilled
    return prefix.find(sequence, sequence.prefill_ids).length


def _waits(sequence: Sequence, known: int, others: SequenceOf[Sequence], prefix: AnyPrefix) -> bool:
    """Whether one of the others computes many of the tokens that it needs, and they will be remembered."""
    if prefix is None or sequence.num_prefilled or not prefix.remembers(sequence):
        return False
    ids, salt, much = sequence.prefill_ids, sequence.request.cache_salt, known + WAITED_FOR
    remembered = [other for other in others if other.request.cache_salt == salt and not other.num_emitted]
    return len(ids) > much and any(other.prefill_ids[:much] == ids[:much] for other in remembered)


def _run(
    target, drafter, scheduler: Scheduler, prefix: AnyPrefix, group: list[Sequence], most: int, done: list[Prefilled]
) -> int:
    """Up to `most` tokens of a group -> how many. A forward takes each as far as the next state that is to be remembered."""
    ends, spent = {}, 0
    for sequence in group:
        try:
            if not sequence.num_prefilled:
                recall(prefix, sequence, scheduler.config.snapshot_every)
        except Exception as error:
            done.append(Prefilled(sequence, fault=error))
            continue
        ends[sequence] = min(len(sequence.prefill_ids), sequence.num_prefilled + max(most - spent, 1))
        spent += ends[sequence] - sequence.num_prefilled
    while ends:
        chunks = [_chunk(sequence, end) for sequence, end in ends.items()]
        started = time.perf_counter()
        try:
            token_ids = _forward(target, drafter, chunks)
            for chunk in chunks:
                chunk.sequence.num_prefilled += len(chunk.token_ids)
                remember_prefilled(prefix, chunk.sequence)
        except Exception as error:
            done += [Prefilled(sequence, fault=error, alone=len(ends) == 1) for sequence in ends]
            break
        seconds = time.perf_counter() - started
        for chunk, token_id in zip(chunks, token_ids, strict=True):
            sequence = chunk.sequence
            sequence.stats.prefill_s += seconds
            if sequence.num_prefilled == len(sequence.prefill_ids):
                done.append(Prefilled(sequence, token_id))
            if sequence.num_prefilled == ends[sequence]:
                del ends[sequence]
    return spent


def _chunk(sequence: Sequence, end: int) -> Chunk:
    ids, first = sequence.prefill_ids, sequence.num_prefilled
    stop = min([end, *(boundary for boundary in sequence.boundaries if boundary > first)])
    return Chunk(sequence, list(ids[first:stop]), stop == len(ids) and not sequence.num_emitted)


def _forward(target, drafter, chunks: list[Chunk]) -> list[int | None]:
    """Commit the chunks' tokens, and what the drafter sees of them; the first token of each answer that begins."""
    if len(chunks) == 1:
        chunk = chunks[0]
        features, token_id = target.prefill(*chunk)
        if chunk.sequence.drafts:
            drafter.absorb(chunk.sequence, features)
        return [token_id]
    features, token_ids = target.prefill_together(chunks)
    drafting = [(chunk.sequence, rows) for chunk, rows in zip(chunks, features, strict=True) if chunk.sequence.drafts]
    if drafting:
        drafter.absorb_together(*zip(*drafting, strict=True))
    return token_ids
