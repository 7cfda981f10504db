"""Target and drafter over pools, for prompts and for rounds that need the host: penalties, bias, grammars, log-probabilities.

Same methods as `Target` and `Drafter`; forwards are replayed graphs, trees come from the host and logits are looked at
there. Rounds without such needs run whole on the device (`device_round`); both work on the same pools.

Letters: R packed rows, N rows a sequence, B sequences, F feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate, pairwise

import numpy as np
import torch

from ddtree.caches.pooled_rows import TREE, PooledRows
from ddtree.engine.drafter import Drafter
from ddtree.engine.graphs import Graph, bucket_of
from ddtree.engine.pooled_state import PooledState
from ddtree.engine.prefill import Chunk
from ddtree.engine.prompt_forward import PromptForwards
from ddtree.engine.sequence import Sequence
from ddtree.engine.target import Target
from ddtree.kernels.compiling import compile_ahead
from ddtree.tree.draft_tree import DraftTree


class GraphTarget(Target):
    """A target whose caches are pools."""

    packs_prompts = True

    def __init__(self, state: PooledState, buckets: tuple[int, ...], *, graphs: bool = True) -> None:
        super().__init__(state.target.model, state.target.feature_layers)
        self.state, self.buckets, self.graphs = state, buckets, graphs
        self.prompts = PromptForwards(state, graphs=graphs)
        self._verifiers: dict[tuple[int, int], Verifier] = {}
        self._last: Verifier | None = None

    def open(self, sequence: Sequence) -> None:
        sequence.target_state = self.state.begin(sequence.request)
        sequence.open_choice(self.model.config.vocab_size, self.device)

    def close(self, sequence: Sequence) -> None:
        if sequence.target_state is not None:
            self.state.close(sequence.target_state.slot)
        super().close(sequence)

    def prefill(self, sequence: Sequence, token_ids: list[int], last: bool) -> tuple[torch.Tensor | None, int | None]:
        (features,), (token_id,) = self.prefill_together([Chunk(sequence, token_ids, last)])
        return features, token_id

    @torch.inference_mode()
    def prefill_together(self, chunks: SequenceOf[Chunk]) -> tuple[list[torch.Tensor | None], list[int | None]]:
        """Commit chunks of several sequences in one forward: of each its features [n, F], if it drafts, and, after its last
        chunk, the first token of the answer."""
        slots = [chunk.sequence.target_state.slot for chunk in chunks]
        firsts = [chunk.sequence.num_prefilled for chunk in chunks]
        drafting = any(chunk.sequence.drafts for chunk in chunks)
        hidden, features = self.prompts.run([chunk.token_ids for chunk in chunks], firsts, slots, drafting)
        starts = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
        token_ids: list[int | None] = [None] * len(chunks)
        ending = [place for place, chunk in enumerate(chunks) if chunk.last]
        if ending:
            logits = self.state.target.logits(hidden[[starts[place + 1] - 1 for place in ending]])
            for row, place in enumerate(ending):
                token_ids[place] = self._first_token(chunks[place], logits[row : row + 1])
        spans = zip(chunks, pairwise(starts), strict=True)
        return [features[start:stop] if chunk.sequence.drafts else None for chunk, (start, stop) in spans], token_ids

    def prepare_one(self) -> bool:
        return self.prompts.prepare_one()

    def _first_token(self, chunk: Chunk, logits: torch.Tensor) -> int:
        sequence = chunk.sequence
        position = sequence.num_prefilled + len(chunk.token_ids)
        token_id = int(self._choose(sequence, DraftTree.root_only(chunk.token_ids[-1]), logits, position)[0])
        self._report(sequence, logits, [token_id])
        return token_id

    @torch.inference_mode()
    def verify(self, sequences: SequenceOf[Sequence], trees: SequenceOf[DraftTree]) -> list[np.ndarray]:
        num_nodes = [tree.num_nodes for tree in trees]
        shape = (len(sequences), bucket_of(sum(num_nodes), self.buckets), bucket_of(max(num_nodes), self.buckets))
        if shape not in self._verifiers:
            self._verifiers[shape] = Verifier(self.state, *shape, graphs=self.graphs)
        self._last = verifier = self._verifiers[shape]
        self._starts = verifier.run(sequences, trees)
        self._features, self._logits = self.state.features, verifier.logits
        self._chosen = [
            self._choose(sequence, tree, self._logits[start : start + tree.num_nodes], sequence.context_length + 1)
            for sequence, tree, start in zip(sequences, trees, self._starts, strict=False)
        ]
        return self._chosen

    @torch.inference_mode()
    def commit(self, sequences: SequenceOf[Sequence], paths: SequenceOf[np.ndarray]) -> list[torch.Tensor | None]:
        self._last.commit(paths)
        features = []
        for sequence, path, start, chosen in zip(sequences, paths, self._starts, self._chosen, strict=False):
            index = start + torch.as_tensor(path, dtype=torch.long).to(self.device)
            features.append(self._features[index] if sequence.drafts else None)
            if sequence.request.num_logprobs is not None:
                self._report(sequence, self._logits[index], chosen[path])
        self._features = self._logits = None
        return features


class Verifier:
    """Static rows, R of them, for B trees of up to N nodes; the forward over them and the commit of their paths."""

    def __init__(self, state: PooledState, num_sequences: int, num_rows: int, most_nodes: int, *, graphs: bool) -> None:
        self.state, self.num_sequences = state, num_sequences
        device = state.device

        def ints(*shape: int, fill: int = 0, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, fill, dtype=kind, device=device)

        self.rows = PooledRows(
            mode=TREE,
            token_ids=ints(num_rows, kind=torch.int64),
            positions=ints(num_rows),
            starts=ints(num_sequences + 1),
            slots=ints(num_sequences, fill=state.dummy),
            row_slots=ints(num_rows, fill=-1),
            row_indices=ints(num_rows),
            parents=ints(num_rows, fill=-1),
            ancestor_mask=ints(num_rows, most_nodes, kind=torch.uint8),
            max_rows=most_nodes,
        )
        self.logits: torch.Tensor | None = None
        if device.type == "cuda":
            compile_ahead([self._forward], device)
        self.graph = Graph(self._forward, device, graphs)

    def _forward(self) -> None:
        self.logits = self.state.target.logits(self.state.target(self.rows, self.state.features))

    def run(self, sequences: SequenceOf[Sequence], trees: SequenceOf[DraftTree]) -> list[int]:
        """Upload the trees and verify them: `logits` [R, V] hold the result. Returns each tree's first row."""
        rows = self.rows
        token_ids = np.zeros(rows.num_rows, dtype=np.int64)
        positions, row_indices = np.zeros((2, rows.num_rows), dtype=np.int32)
        row_slots, parents = np.full((2, rows.num_rows), -1, dtype=np.int32)
        mask = np.zeros(rows.ancestor_mask.shape, dtype=np.uint8)
        starts = np.cumsum([0, *(tree.num_nodes for tree in trees)], dtype=np.int32)
        for sequence, tree, start in zip(sequences, trees, starts.tolist(), strict=False):
            own = slice(start, start + tree.num_nodes)
            token_ids[own], parents[own] = tree.token_ids, tree.parents
            positions[own] = sequence.context_length + tree.depths
            row_slots[own], row_indices[own] = sequence.target_state.slot, np.arange(tree.num_nodes)
            mask[own, : tree.num_nodes] = tree.ancestor_mask()
        slots = np.array([sequence.target_state.slot for sequence in sequences], dtype=np.int32)
        uploads = (
            (rows.token_ids, token_ids),
            (rows.positions, positions),
            (rows.starts, starts),
            (rows.slots, slots),
            (rows.row_slots, row_slots),
            (rows.row_indices, row_indices),
            (rows.parents, parents),
            (rows.ancestor_mask, mask),
        )
        for buffer, values in uploads:
            buffer.copy_(torch.from_numpy(values), non_blocking=True)
        self.graph.replay()
        return starts.tolist()

    def commit(self, paths: SequenceOf[np.ndarray]) -> None:
        """Make the paths permanent and count them in."""
        longest = max(len(path) for path in paths)
        padded = np.zeros((self.num_sequences, max(longest, 1)), dtype=np.int32)
        for index, path in enumerate(paths):
            padded[index, : len(path)] = path
        device, rows, state = self.state.device, self.rows, self.state
        lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32).to(device)
        state.target.pool.commit(rows.slots, rows.starts, torch.from_numpy(padded).to(device), lengths)
        state.table.context_lengths.index_add_(0, rows.slots.long(), lengths)


class GraphDrafter(Drafter):
    """A drafter whose caches are pools. Every plain round's features are taken in at once, by both kinds of round."""

    def __init__(self, state: PooledState, *, graphs: bool = True) -> None:
        super().__init__(state.drafter.model, state.target.model, state.conditioning)
        self.state, self.graphs = state, graphs
        self._drafts: dict[tuple[int, int], BlockDraft] = {}

    def open(self, sequence: Sequence) -> None:
        sequence.drafter_state = sequence.target_state

    @torch.inference_mode()
    def absorb(self, sequence: Sequence, features: torch.Tensor) -> None:
        slots = torch.tensor([sequence.drafter_state.slot], dtype=torch.int32, device=self.device)
        lengths = torch.tensor([len(features)], dtype=torch.int32, device=self.device)
        self.state.drafter.absorb(features[None], slots, lengths)

    @torch.inference_mode()
    def absorb_together(self, sequences: SequenceOf[Sequence], features: SequenceOf[torch.Tensor]) -> None:
        slots = np.array([sequence.drafter_state.slot for sequence in sequences], dtype=np.int32)
        lengths = [len(rows) for rows in features]
        behind = np.concatenate([np.arange(-length, 0, dtype=np.int32) for length in lengths])
        row_slots, behind = torch.from_numpy(np.stack((slots.repeat(lengths), behind))).to(self.device)
        places = self.state.table.context_lengths[row_slots.long()] + behind
        self.state.drafter.absorb_rows(torch.cat(list(features)), row_slots, places)

    def commit(self, sequences: SequenceOf[Sequence], features: SequenceOf[torch.Tensor | None]) -> None:
        for sequence, path_features in zip(sequences, features, strict=True):
            if sequence.drafts:
                self.absorb(sequence, path_features)

    def draft_blocks(self, sequences: SequenceOf[Sequence], num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(sequences), num_slots)
        if shape not in self._drafts:
            self._drafts[shape] = BlockDraft(self.state, *shape, graphs=self.graphs)
        return self._drafts[shape].run(sequences)


class BlockDraft:
    """One block each for B sequences, as a graph."""

    def __init__(self, state: PooledState, num_sequences: int, num_slots: int, *, graphs: bool) -> None:
        self.state, self.num_slots = state, num_slots
        self.slots = torch.full((num_sequences,), state.dummy, dtype=torch.int32, device=state.device)
        self.roots = torch.zeros(num_sequences, dtype=torch.int64, device=state.device)
        self.drafted: tuple[torch.Tensor, torch.Tensor] | None = None
        if state.device.type == "cuda":
            compile_ahead([self._draft], state.device)
        self.graph = Graph(self._draft, state.device, graphs)

    def _draft(self) -> None:
        self.drafted = self.state.drafter.draft(self.roots, self.slots, self.num_slots)

    def run(self, sequences: SequenceOf[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, K, C] and logits [B, K - 1, V]."""
        slots = torch.tensor([sequence.drafter_state.slot for sequence in sequences], dtype=torch.int32)
        self.slots.copy_(slots, non_blocking=True)
        self.roots.copy_(torch.tensor([sequence.root_token for sequence in sequences]), non_blocking=True)
        self.graph.replay()
        return self.drafted
