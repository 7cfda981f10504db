"""The target: the model whose output must be reproduced. Prefill, verify, commit, over many sequences at once.

Letters: R packed rows of all sequences, N nodes of one tree, V vocabulary, F feature width (layers x C).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from ddtree.caches.rows import Rows, Span
from ddtree.engine.sequence import Sequence
from ddtree.sampling.choose import choose
from ddtree.sampling.logprobs import token_logprobs
from ddtree.tree.draft_tree import ROOT, DraftTree

NOT_CHOSEN = -1  # the token of a node that the walk cannot reach


class Target:
    """Runs a target model. `feature_layers` are what the drafter wants to see; () without one."""

    packs_prompts = False  # whether `prefill_together` takes chunks of several sequences

    def __init__(self, model, feature_layers: tuple[int, ...] = ()):
        self.model = model
        self.feature_layers = tuple(feature_layers)
        self.device = next(model.parameters()).device
        self._features: torch.Tensor | None = None  # [R, F] of the last verify
        self._logits: torch.Tensor | None = None  # [R, V] of the last verify
        self._chosen: list[np.ndarray] = []  # per tree its target tokens, [N]
        self._starts: list[int] = []

    def open(self, sequence: Sequence) -> None:
        """Give the sequence its caches."""
        sequence.target_state = self.model.new_cache()
        sequence.open_choice(self.model.config.vocab_size, self.device)

    @torch.inference_mode()
    def prefill(self, sequence: Sequence, token_ids: list[int], last: bool) -> tuple[torch.Tensor | None, int | None]:
        """Commit a chunk of prompt tokens; returns its features [T, F] (None if nobody drafts) and, after the last
        chunk, the first token of the answer."""
        cache = sequence.target_state
        start, count = cache.context_length, len(token_ids)
        rows = Rows(
            token_ids=torch.tensor(token_ids, dtype=torch.long, device=self.device),
            positions=torch.arange(start, start + count, device=self.device),
            spans=(Span(cache, 0, count, ancestor_mask=None, parents=None),),
        )
        output = self.model(rows, self._wanted([sequence]))
        cache.commit(torch.arange(count, device=self.device))
        if not last:
            return output.features, None
        logits = self.model.logits(output.hidden[-1:])
        token_id = int(self._choose(sequence, DraftTree.root_only(token_ids[-1]), logits, start + count)[0])
        self._report(sequence, logits, [token_id])
        return output.features, token_id

    @torch.inference_mode()
    def verify(self, sequences: SequenceOf[Sequence], trees: SequenceOf[DraftTree]) -> list[np.ndarray]:
        """One forward over all nodes of all trees; per tree the token that the target chose after each node, [N].

        The rows stay staged until `commit`.
        """
        rows = self._pack(sequences, trees)
        output = self.model(rows, self._wanted(sequences))
        self._features, self._starts = output.features, [span.start for span in rows.spans]
        self._logits = logits = self.model.logits(output.hidden)
        self._chosen = [
            self._choose(sequence, tree, logits[span.start : span.stop], sequence.context_length + 1)
            for sequence, tree, span in zip(sequences, trees, rows.spans, strict=True)
        ]
        return self._chosen

    @torch.inference_mode()
    def commit(self, sequences: SequenceOf[Sequence], paths: SequenceOf[np.ndarray]) -> list[torch.Tensor | None]:
        """Make each path permanent in its sequence's caches; returns the features of the *path's* rows, [n, F]."""
        features = []
        for sequence, path, start, chosen in zip(sequences, paths, self._starts, self._chosen, strict=True):
            index = torch.as_tensor(path, dtype=torch.long).to(self.device)
            sequence.target_state.commit(index)
            wanted = sequence.drafts and self._features is not None
            features.append(self._features[start + index] if wanted else None)
            if sequence.request.num_logprobs is not None:
                self._report(sequence, self._logits[start + index], chosen[path])
        self._features = self._logits = None
        return features

    def prepare_one(self) -> bool:
        """Do one thing that a later request would wait for. False where nothing is left."""
        return False

    def close(self, sequence: Sequence) -> None:
        """Drop what the sequence remembers."""
        sequence.target_state = None

    def _wanted(self, sequences: SequenceOf[Sequence]) -> tuple[int, ...]:
        return self.feature_layers if any(sequence.drafts for sequence in sequences) else ()

    def _pack(self, sequences: SequenceOf[Sequence], trees: SequenceOf[DraftTree]) -> Rows:
        token_ids = np.concatenate([tree.token_ids for tree in trees])
        positions = np.concatenate(
            [sequence.context_length + tree.depths for sequence, tree in zip(sequences, trees, strict=True)]
        )
        spans, start = [], 0
        for sequence, tree in zip(sequences, trees, strict=True):
            mask = parents = None
            if tree.num_nodes > 1:
                mask = torch.from_numpy(tree.ancestor_mask()).to(self.device)
                parents = torch.from_numpy(tree.parents.astype(np.int64)).to(self.device)
            spans.append(Span(sequence.target_state, start, start + tree.num_nodes, mask, parents))
            start += tree.num_nodes
        return Rows(
            token_ids=torch.from_numpy(token_ids).to(self.device),
            positions=torch.from_numpy(positions.astype(np.int64)).to(self.device),
            spans=tuple(spans),
        )

    def _choose(self, sequence: Sequence, tree: DraftTree, logits: torch.Tensor, position: int) -> np.ndarray:
        return choose_tokens(sequence, tree, logits, position)

    def _report(self, sequence: Sequence, logits: torch.Tensor, token_ids: SequenceOf[int]) -> None:
        """Note the log-probabilities of emitted tokens, from the rows `logits [n, V]` that chose them."""
        if sequence.request.num_logprobs is not None:
            sequence.logprobs += token_logprobs(logits, token_ids, sequence.request.num_logprobs)


def choose_tokens(sequence: Sequence, tree: DraftTree, logits: torch.Tensor, position: int) -> np.ndarray:
    """The token after each node of a tree, [N], from `logits [N, V]`; `position` is that of the token after the root."""
    noise = None
    if sequence.noise is not None:
        # The token after a node sits one position below it; siblings share their depth's noise.
        window = sequence.noise(position, int(tree.depths.max()) + 1)
        noise = window[torch.from_numpy(tree.depths.astype(np.int64)).to(logits.device)]
    adjusted = sequence.adjust(logits, tree.token_ids, tree.parents)
    if sequence.request.grammar is not None:
        return _choose_along(sequence, tree, adjusted, noise)
    return choose(adjusted, sequence.request.sampling, noise).cpu().numpy()


def _choose_along(
    sequence: Sequence, tree: DraftTree, logits: torch.Tensor, noise: torch.Tensor | None
) -> np.ndarray:
    """Under a grammar, which is asked for a mask per node: only the nodes to which the target's own tokens lead."""
    chosen = np.full(tree.num_nodes, NOT_CHOSEN, dtype=np.int64)
    node, path = ROOT, []
    while True:
        row = sequence.forbid(logits[node : node + 1], path)
        noise_row = None if noise is None else noise[node : node + 1]
        token_id = int(choose(row, sequence.request.sampling, noise_row)[0])
        chosen[node] = token_id
        children = tree.children(node)
        match = children[tree.token_ids[children] == token_id]
        if not len(match):
            return chosen
        node, path = int(match[0]), [*path, token_id]
