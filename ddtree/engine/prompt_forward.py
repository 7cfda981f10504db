"""Short prompts over pools as CUDA graphs: launching so small a forward's kernels takes longer than their work.

Letters: R packed rows, B sequences, C model width, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import product

import torch

from ddtree.caches.pooled_rows import PooledRows, PromptIndices, prompt_rows
from ddtree.engine.graphs import Graph, bucket_of
from ddtree.engine.pooled_state import PooledState
from ddtree.kernels.compiling import compile_ahead

ROWS = (16, 64, 128, 256, 512, 1024, 2048)  # that a forward may be captured for,
MOST_WORK = 1.5e13  # while it has no more operations: beyond, the work itself keeps the device busy
BATCHES = (1, 8, 64)


class PromptForward:
    """The target's forward over consecutive tokens of up to B sequences, R rows in all, captured once and replayed."""

    def __init__(
        self, state: PooledState, num_sequences: int, num_rows: int, features: torch.Tensor | None, *, graphs: bool, pool=None
    ) -> None:
        """`features` [>= R, F] are written to; `pool` is where graphs that never run at once have their memory."""
        self.state, self.num_sequences, self.num_rows = state, num_sequences, num_rows
        self.rows = prompt_rows(self._indices([], [], []), state.device)
        self.features = features
        self.hidden: torch.Tensor | None = None
        if graphs and state.device.type == "cuda":
            compile_ahead([self._forward], state.device)
        self.graph = Graph(self._forward, state.device, graphs, pool)

    def _indices(self, token_ids: SequenceOf[SequenceOf[int]], firsts: SequenceOf[int], slots: SequenceOf[int]) -> PromptIndices:
        indices = PromptIndices.of(token_ids, firsts, slots)
        return indices.padded(self.num_rows, self.num_sequences, self.state.dummy)

    def _forward(self) -> None:
        self.hidden = run_prompts(self.state, self.rows, self.features)

    def run(
        self, token_ids: SequenceOf[SequenceOf[int]], firsts: SequenceOf[int], slots: SequenceOf[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `PromptForwards.run`; the result is that of the last call alone."""
        self._indices(token_ids, firsts, slots).copy_to(self.rows)
        self.graph.replay()
        return self.hidden, self.features


class PromptForwards:
    """Forwards of prompts: short ones padded to shapes that are captured, long ones as they are, kernel by kernel."""

    def __init__(self, state: PooledState, *, graphs: bool = True) -> None:
        self.state, self.graphs = state, graphs
        self.pads = state.device.type == "cuda"  # with graphs or without, so that both give the same bits
        operations = 2 * sum(parameter.numel() for parameter in state.target.model.parameters())
        self.buckets = tuple(rows for rows in ROWS if rows * operations <= MOST_WORK) or ROWS[:1]
        self._pool = torch.cuda.graph_pool_handle() if self.pads and graphs else None
        self._features: torch.Tensor | None = None
        self._captured: dict[tuple[int, int], PromptForward] = {}

    def prepare_one(self) -> bool:
        """Capture a shape that is not yet: of those of one prompt, then of as many as there are slots. False where none is left."""
        batches = sorted({1, bucket_of(min(self.state.dummy, BATCHES[-1]), BATCHES)}) if self.pads and self.graphs else ()
        missing = [shape for shape in product(batches, self.buckets) if shape not in self._captured]
        if missing:
            self._forward_of(*missing[0])
        return len(missing) > 1

    def run(
        self, token_ids: SequenceOf[SequenceOf[int]], firsts: SequenceOf[int], slots: SequenceOf[int], wants_features: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Commit the next prompt tokens of several sequences: `token_ids[b]` from place `firsts[b]` on, in slot `slots[b]`.

        Returns hidden states [>= rows, C] after the final norm and target features [>= rows, F], of which the first rows are theirs,
        one sequence after the other; both may be written over by the next call.
        """
        state, num_rows = self.state, sum(map(len, token_ids))
        if self.pads and num_rows <= self.buckets[-1] and len(slots) <= BATCHES[-1]:
            forward = self._forward_of(bucket_of(len(slots), BATCHES), bucket_of(num_rows, self.buckets))
            return forward.run(token_ids, firsts, slots)
        features = self._new_features(num_rows) if wants_features else None
        rows = prompt_rows(PromptIndices.of(token_ids, firsts, slots), state.device)
        return run_prompts(state, rows, features), features

    def _forward_of(self, batch: int, num_rows: int) -> PromptForward:
        shape = (batch, num_rows)
        if shape not in self._captured:
            if self._features is None and self.state.drafter is not None:
                self._features = self._new_features(self.buckets[-1])
            self._captured[shape] = PromptForward(self.state, *shape, self._features, graphs=self.graphs, pool=self._pool)
        return self._captured[shape]

    def _new_features(self, num_rows: int) -> torch.Tensor:
        state = self.state
        return torch.empty(num_rows, state.target.feature_width, dtype=state.features.dtype, device=state.device)


def run_prompts(state: PooledState, rows: PooledRows, features: torch.Tensor | None) -> torch.Tensor:
    """Commit `rows` and count them in -> hidden states [R, C]; `features` [>= R, F] are filled where given."""
    hidden = state.target(rows, features)
    state.table.context_lengths.index_add_(0, rows.slots.long(), rows.starts.diff())
    return hidden
