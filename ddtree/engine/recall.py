"""Between a sequence and the prefix cache: begin with what is known, and leave what others may need."""

from __future__ import annotations

import logging

from ddtree.engine.paged_prefix import PagedPrefixCache
from ddtree.engine.prefix import PrefixCache
from ddtree.engine.prefix_tree import LEAST_TOKENS
from ddtree.engine.sequence import Sequence

log = logging.getLogger(__name__)

AnyPrefix = PrefixCache | PagedPrefixCache | None


def recall(prefix: AnyPrefix, sequence: Sequence, snapshot_every: int) -> None:
    """Before the first chunk: take over the longest known prefix, and plan where a hybrid's state will be remembered."""
    if prefix is None or not prefix.remembers(sequence):
        return
    ids = sequence.prefill_ids
    found = prefix.find(sequence, ids)
    if found.length:
        prefix.restore(found, sequence)
        sequence.num_prefilled = found.length
        if not sequence.num_emitted and not sequence.stats.preemptions:
            sequence.stats.cached_tokens = found.length
    if prefix.is_stateful(sequence) and not sequence.num_emitted:
        sequence.boundaries = boundaries_of(sequence, found.branch, snapshot_every)


def boundaries_of(sequence: Sequence, branch: int, snapshot_every: int) -> list[int]:
    """Prompt lengths after which a hybrid's state is worth a copy: where it parts from what is remembered (`branch`), so
    that a shared system prompt is found on its second use; multiples of `snapshot_every`; what the request names; and all
    but the last token, so that the same prompt can be answered again and further choices begin there."""
    length = len(sequence.request.prompt_token_ids)
    wanted = {branch, length - 1, *sequence.request.boundaries, *range(snapshot_every, length, snapshot_every)}
    return sorted(b for b in wanted if max(sequence.num_prefilled + 1, LEAST_TOKENS) <= b < length)


def remember_prefilled(prefix: AnyPrefix, sequence: Sequence) -> None:
    """After a chunk: what was planned, or, where rows say it all, the whole prompt. A fault costs the memory, not the answer."""
    if prefix is None or sequence.num_emitted or not prefix.remembers(sequence):
        return
    count, prompt = sequence.num_prefilled, sequence.request.prompt_token_ids
    if count in sequence.boundaries or (count == len(prompt) and not prefix.is_stateful(sequence)):
        try:
            prefix.add(sequence, prompt[:count])
        except Exception:
            log.exception("the prompt of request %d could not be remembered", sequence.request_id)


def remember(prefix: AnyPrefix, sequence: Sequence, drafter) -> None:
    """At the end of an answer: all that is committed, for the next turn. A fault here costs the memory, not the answer."""
    if prefix is None or not prefix.remembers(sequence) or sequence.prefilling:
        return
    try:
        if sequence.drafts and sequence.pending_features:
            drafter.absorb(sequence, sequence.pending_features[0][:0])  # nothing new: takes in what waits
        prefix.add(sequence, sequence.token_ids[:-1])
    except Exception:
        log.exception("the prefix of request %d could not be remembered", sequence.request_id)
