"""Seeing what a model really computes: every layer's parts, by hooks on what layers and caches declare.

Nothing here knows an architecture. A layer's parts are its child modules and what it stages into its cache, named as
they come, in the order in which they come; so a part that does not exist yet is observed as well.

Letters: R rows of one forward, n rows staged by one sequence, T committed and staged rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ddtree.caches.rows import Rows, Span

Stage = tuple[int, str]  # layer, part
EMBEDDING = "embedding"
OUTPUT = "output"
KEYS, VALUES = "keys", "values"


@dataclass(eq=False)
class Forward:
    """One forward: the rows that went in, and every part's result, in the order of computation."""

    rows: Rows
    parts: dict[Stage, torch.Tensor] = field(default_factory=dict)  # each [R, ..]
    hidden: torch.Tensor | None = None  # [R, C] after the final norm

    def layer_output(self, layer: int, num_layers: int) -> torch.Tensor:
        """What feature layer `layer` means: its output, after the final norm for the last one."""
        return self.hidden if layer == num_layers - 1 else self.parts[layer, OUTPUT]

    def of_span(self, place: int) -> Forward:
        """The rows of one of the sequences that were packed together, as a forward of their own."""
        span = self.rows.spans[place]
        own, count = slice(span.start, span.stop), len(self.rows.token_ids)
        return Forward(
            Rows(self.rows.token_ids[own], self.rows.positions[own], (replace(span, start=0, stop=span.num_rows),)),
            {stage: part[own] if len(part) == count else part for stage, part in self.parts.items()},
            self.hidden[own],
        )


class Observer:
    """Hooks on a target model; `forwards` grows while they are on."""

    def __init__(self, model) -> None:
        self.model = model
        self.forwards: list[Forward] = []
        self.deep = True  # off: only the rows are kept

    @contextmanager
    def __call__(self) -> Iterator[Observer]:
        handles = [
            self.model.register_forward_pre_hook(self._begin),
            self.model.register_forward_hook(self._end),
        ]
        for index, layer in enumerate(self.model.layers):
            handles.append(layer.register_forward_hook(self._part(index, OUTPUT)))
            for name, child in layer.named_children():
                handles.append(child.register_forward_hook(self._part(index, name)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    @property
    def last(self) -> Forward:
        return self.forwards[-1]

    def take(self) -> list[Forward]:
        """All forwards since the last call."""
        taken, self.forwards = self.forwards, []
        return taken

    def _begin(self, module, args) -> None:
        self.forwards.append(Forward(args[0]))
        if self.deep:
            for span in args[0].spans:
                self._watch_cache(span.cache)

    def _end(self, module, args, output) -> None:
        self.last.hidden = output.hidden
        for span in self.last.rows.spans:
            for cache in getattr(span.cache, "layers", ()):
                for name in ("stage", "stage_conv"):
                    cache.__dict__.pop(name, None)

    def _part(self, layer: int, name: str):
        def hook(module, args, output) -> None:
            if self.deep and self.forwards and torch.is_tensor(output):
                # A copy: a later part may work in place.
                self.last.parts[layer, name] = output.detach().clone()

        return hook

    def _watch_cache(self, cache) -> None:
        for index, layer_cache in enumerate(cache.layers):
            for name in ("stage_conv", "stage"):
                if hasattr(layer_cache, name):
                    setattr(layer_cache, name, self._staging(index, name, getattr(layer_cache, name)))

    def _staging(self, layer: int, name: str, inner):
        """A recurrent cache's parts are what it answers, a KV cache's are what it is given."""

        def stage(*args, **options):
            result = inner(*args, **options)
            if name == "stage_conv":
                self._append((layer, "conv"), result)
            elif torch.is_tensor(result):
                self._append((layer, "recurrent"), result)
            else:
                given = [*args, *options.values()]
                self._append((layer, VALUES), given[1])
                self._append((layer, KEYS), given[0])
            return result

        return stage

    def _append(self, stage: Stage, rows: torch.Tensor) -> None:
        """Sequences stage one after the other, in the order of their rows."""
        before = self.last.parts.get(stage)
        rows = rows.detach().clone()
        self.last.parts[stage] = rows if before is None else torch.cat((before, rows))


@torch.inference_mode()
def run_alone(model, token_ids: Sequence[int], commit: bool = False) -> tuple[Forward, object]:
    """One forward over consecutive tokens from an empty cache, observed; returns it and the cache.

    The reference of every comparison: no tree, no earlier round, no commit takes part in it.
    """
    device = next(model.parameters()).device
    cache = model.new_cache()
    count = len(token_ids)
    rows = Rows(
        torch.tensor(list(token_ids), dtype=torch.long, device=device),
        torch.arange(count, device=device),
        (Span(cache, 0, count, None, None),),
    )
    with Observer(model)() as observer:
        model(rows)
    if commit:
        cache.commit(torch.arange(count, device=device))
    return observer.last, cache


@torch.inference_mode()
def run_after(model, cache, token_ids: Sequence[int]) -> Forward:
    """One forward over consecutive tokens after what `cache` holds; nothing is committed."""
    device = next(model.parameters()).device
    start, count = cache.context_length, len(token_ids)
    rows = Rows(
        torch.tensor(list(token_ids), dtype=torch.long, device=device),
        torch.arange(start, start + count, device=device),
        (Span(cache, 0, count, None, None),),
    )
    with Observer(model)() as observer:
        model(rows)
    cache.commit(torch.empty(0, dtype=torch.long, device=device))
    return observer.last


@torch.inference_mode()
def rerun(model, forward_rows: Rows, cache, token_ids: torch.Tensor) -> Forward:
    """The same tree rows with other tokens, over `cache`; nothing is committed."""
    span = forward_rows.spans[0]
    rows = Rows(
        token_ids,
        forward_rows.positions,
        (Span(cache, 0, span.num_rows, span.ancestor_mask, span.parents),),
    )
    with Observer(model)() as observer:
        model(rows)
    cache.commit(torch.empty(0, dtype=torch.long, device=token_ids.device))
    return observer.last


@torch.inference_mode()
def memory(layer_cache) -> dict[str, torch.Tensor]:
    """What a layer's cache has committed: keys and values [T, Hkv, D], or every tensor that it shows."""
    shown = {
        name: value
        for name, value in vars(layer_cache).items()
        if torch.is_tensor(value) and not name.startswith("_")
    }
    if shown:
        return {name.replace("_", " "): value.detach().clone() for name, value in shown.items()}
    device, dtype, heads, width = _kv_shape(layer_cache)
    nothing = torch.empty(0, heads, width, dtype=dtype, device=device)
    keys, values = layer_cache.stage(nothing, nothing)
    return {KEYS: keys.transpose(0, 1).clone(), VALUES: values.transpose(0, 1).clone()}


def _kv_shape(layer_cache):
    buffer = next(value for value in vars(layer_cache).values() if torch.is_tensor(value))
    return buffer.device, buffer.dtype, buffer.shape[0], buffer.shape[2]
