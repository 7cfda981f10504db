"""Stand between an engine and its target and drafter, and keep what every round did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from ddtree.audit.observe import Forward, Observer
from ddtree.engine.request import Request
from ddtree.tree.draft_tree import DraftTree


@dataclass(eq=False)
class Drafted:
    """What the drafter was given and made of it in one round."""

    root_token: int
    context_length: int
    block: torch.Tensor | None = None  # [K, C], the embeddings that went in
    hidden: torch.Tensor | None = None  # [K, C]
    parts: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)  # (layer, part) -> [K, ..]
    candidates: object = None


@dataclass(eq=False)
class Record:
    """One round of one sequence, or its prefill (`tree` is None). Caches are as this step left them."""

    request: Request
    tokens_before: list[int]  # prompt and emitted; the prefill's is the prompt
    tree_budget: int = 0
    tokens_after: list[int] = field(default_factory=list)
    tree: DraftTree | None = None
    forward: Forward | None = None
    target_tokens: np.ndarray | None = None
    path: np.ndarray | None = None
    absorbed: list[torch.Tensor] = field(default_factory=list)  # features that entered the drafter in this step
    drafted: Drafted | None = None
    target_cache: object = None
    drafter_cache: object = None

    @property
    def emitted(self) -> list[int]:
        return self.tokens_after[len(self.tokens_before) :]


class Watch:
    """The engine's running sequences, step by step."""

    def __init__(self, observer: Observer | None) -> None:
        self.observer = observer
        self.sequences: dict[int, object] = {}  # request id -> sequence
        self.records: dict[int, Record] = {}  # of the steps in flight
        self.drafting: list[Record] = []  # whose blocks the drafter computes just now, in its order

    def open(self, sequence) -> None:
        self.sequences[sequence.request_id] = sequence

    def record(self, sequence) -> Record:
        """The sequence's step in flight; begun if there is none."""
        if sequence.request_id not in self.records:
            self.records[sequence.request_id] = Record(sequence.request, list(sequence.token_ids), sequence.tree_budget)
        return self.records[sequence.request_id]

    def holding(self, cache) -> Record | None:
        """The step in flight of the sequence whose drafter context `cache` is."""
        for request_id, record in self.records.items():
            if self.sequences[request_id].drafter_state is cache:
                return record
        return None

    def finish_step(self) -> list[Record]:
        """What the step did: whole rounds, and whole prefills."""
        done = []
        for request_id, record in list(self.records.items()):
            tokens = self.sequences[request_id].token_ids
            if len(tokens) > len(record.tokens_before):
                record.tokens_after = list(tokens)
                done.append(self.records.pop(request_id))
        return done


class WatchedTarget:
    """A target that tells what it does; everything else is its own."""

    def __init__(self, inner, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def open(self, sequence) -> None:
        self._inner.open(sequence)
        self._watch.open(sequence)

    def prefill(self, sequence, token_ids, last):
        record = self._watch.record(sequence)
        result = self._inner.prefill(sequence, token_ids, last)
        record.target_cache, record.drafter_cache = sequence.target_state, sequence.drafter_state
        return result

    def prefill_together(self, chunks):
        records = [self._watch.record(chunk.sequence) for chunk in chunks]
        result = self._inner.prefill_together(chunks)
        for record, chunk in zip(records, chunks, strict=True):
            record.target_cache, record.drafter_cache = chunk.sequence.target_state, chunk.sequence.drafter_state
        return result

    def verify(self, sequences, trees):
        watch = self._watch
        records = [watch.record(sequence) for sequence in sequences]
        tokens = self._inner.verify(sequences, trees)
        for place, (record, sequence) in enumerate(zip(records, sequences, strict=True)):
            record.tree, record.target_tokens = trees[place], np.array(tokens[place])
            record.forward = watch.observer.last.of_span(place) if watch.observer else None
            record.target_cache, record.drafter_cache = sequence.target_state, sequence.drafter_state
        return tokens

    def commit(self, sequences, paths):
        for sequence, path in zip(sequences, paths, strict=True):
            self._watch.record(sequence).path = np.array(path)
        return self._inner.commit(sequences, paths)


class WatchedDrafter:
    """A drafter that tells what it is given and what it hands out."""

    def __init__(self, inner, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def draft(self, sequences):
        records = [self._watch.record(sequence) for sequence in sequences]
        for record, sequence in zip(records, sequences, strict=True):
            record.drafted = Drafted(sequence.root_token, sequence.context_length)
        found = self._inner.draft(sequences)
        for record, candidates in zip(records, found, strict=True):
            record.drafted.candidates = candidates
        return found


@contextmanager
def watched(engine, drafter=None, deep: bool = True) -> Iterator[Watch]:
    """Watch `engine`, for the time being with `drafter` in its own one's place."""
    target, own = engine.target, engine.drafter
    used = own if drafter is None else drafter
    observer = Observer(target.model) if deep else None
    watch = Watch(observer)
    engine.target = WatchedTarget(target, watch)
    engine.drafter = None if used is None else WatchedDrafter(used, watch)
    model = getattr(used, "model", None)
    try:
        with _observing(observer), _drafter_hooks(model, watch):
            yield watch
    finally:
        engine.target, engine.drafter = target, own


@contextmanager
def _observing(observer: Observer | None) -> Iterator[None]:
    if observer is None:
        yield
        return
    with observer():
        yield


@contextmanager
def _drafter_hooks(model, watch: Watch) -> Iterator[None]:
    """What enters the drafter's context and its block, and what each of its parts makes of the block."""
    if model is None or not hasattr(model, "absorb"):
        yield
        return
    absorb = model.absorb

    def absorbing(features, cache):
        record = watch.holding(cache)
        if record is not None:
            record.absorbed.append(features.detach().clone())
        return absorb(features, cache)

    def before(module, args):
        watch.drafting = [watch.holding(cache) for cache in args[1]]
        for record, block in zip(watch.drafting, args[0], strict=True):
            if record is not None:
                record.drafted.block = block.detach().clone()

    def after(module, args, output):
        for record, hidden in zip(watch.drafting, output, strict=True):
            if record is not None:
                record.drafted.hidden = hidden.detach().clone()

    handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    for index, layer in enumerate(model.layers):
        for name, child in layer.named_children():
            handles.append(child.register_forward_hook(_part_hook(watch, index, name)))
    had = model.__dict__.get("absorb")
    model.absorb = absorbing
    try:
        yield
    finally:
        if had is None:
            del model.absorb
        else:
            model.absorb = had
        for handle in handles:
            handle.remove()


def _part_hook(watch: Watch, layer: int, name: str):
    def hook(module, args, output) -> None:
        # Rows of one block after the other.
        for record, rows in zip(watch.drafting, output.chunk(max(len(watch.drafting), 1)), strict=True):
            if record is not None and record.drafted is not None:
                record.drafted.parts[layer, name] = rows.detach().clone()

    return hook
