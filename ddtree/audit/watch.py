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
    """The engine's one running sequence, step by step."""

    def __init__(self, engine, observer: Observer | None) -> None:
        self.observer = observer
        self.target, self.drafter = engine.target, engine.drafter
        self.sequence = None
        self.record: Record | None = None

    def open(self, sequence) -> None:
        self.sequence = sequence

    def begin(self) -> None:
        sequence = self.sequence
        self.record = Record(sequence.request, list(sequence.token_ids), sequence.tree_budget)

    def finish_step(self) -> Record | None:
        """What the step did, once it is a whole round or the whole prefill."""
        record, sequence = self.record, self.sequence
        if record is None or len(sequence.token_ids) <= len(record.tokens_before):
            return None
        record.tokens_after = list(sequence.token_ids)
        self.record = None
        return record


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
        watch = self._watch
        if watch.record is None:
            watch.begin()
        result = self._inner.prefill(sequence, token_ids, last)
        watch.record.target_cache = sequence.target_state
        watch.record.drafter_cache = sequence.drafter_state
        return result

    def verify(self, sequences, trees):
        watch, (sequence,), (tree,) = self._watch, sequences, trees
        if watch.record is None:
            watch.begin()
        tokens = self._inner.verify(sequences, trees)
        record = watch.record
        record.tree, record.target_tokens = tree, np.array(tokens[0])
        record.forward = watch.observer.last if watch.observer else None
        record.target_cache, record.drafter_cache = sequence.target_state, sequence.drafter_state
        return tokens

    def commit(self, sequences, paths):
        self._watch.record.path = np.array(paths[0])
        return self._inner.commit(sequences, paths)


class WatchedDrafter:
    """A drafter that tells what it is given and what it hands out."""

    def __init__(self, inner, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def draft(self, sequences):
        watch, (sequence,) = self._watch, sequences
        watch.begin()
        watch.record.drafted = Drafted(sequence.root_token, sequence.context_length)
        found = self._inner.draft(sequences)
        watch.record.drafted.candidates = found[0]
        return found


@contextmanager
def watched(engine, drafter=None, deep: bool = True) -> Iterator[Watch]:
    """Watch `engine`, for the time being with `drafter` in its own one's place."""
    target, own = engine.target, engine.drafter
    used = own if drafter is None else drafter
    observer = Observer(target.model) if deep else None
    watch = Watch(engine, observer)
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
        if watch.record is not None:
            watch.record.absorbed.append(features.detach().clone())
        return absorb(features, cache)

    def before(module, args):
        watch.record.drafted.block = args[0][0].detach().clone()

    def after(module, args, output):
        watch.record.drafted.hidden = output[0].detach().clone()

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
        if watch.record is not None and watch.record.drafted is not None:
            watch.record.drafted.parts[layer, name] = output.detach().clone()

    return hook
