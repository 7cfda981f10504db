"""The drafter: absorb target features, draft a block, hand out the best candidates per depth."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from ddtree.engine.sequence import Sequence
from ddtree.sampling.choose import rank_scores
from ddtree.tree.build import Candidates


class Drafter:
    """Runs a DFlash model beside its target, whose embedding and head it borrows (arXiv 2602.06036, §3)."""

    def __init__(self, model, target_model):
        self.model = model
        self.target_model = target_model
        self.device = next(model.parameters()).device

    @property
    def block_size(self) -> int:
        return self.model.config.block_size

    @property
    def max_context(self) -> int | None:
        """Positions the drafter was made for; past them plain decoding takes over. None if it says nothing."""
        config = self.model.config
        limits = [limit for limit in (config.max_position_embeddings, config.rope.context_limit) if limit]
        return min(limits, default=None)

    def open(self, sequence: Sequence) -> None:
        sequence.drafter_state = self.model.new_cache()

    @torch.inference_mode()
    def absorb(self, sequence: Sequence, features: torch.Tensor) -> None:
        """Take the target features [T, F] of newly committed tokens into the drafter's context."""
        self.model.absorb(features, sequence.drafter_state)

    @torch.inference_mode()
    def draft(self, sequences: SequenceOf[Sequence]) -> list[Candidates | None]:
        """One block for every sequence that drafts; its candidates are ranked with the request's own noise."""
        depths = [self._depth_limit(sequence) for sequence in sequences]
        active = [sequence for sequence, depth in zip(sequences, depths, strict=True) if depth]
        if not active:
            return [None] * len(sequences)
        num_slots = self.block_size
        if self.model.config.shrinkable_block:
            num_slots = min(num_slots, 1 + max(depths))
        roots = torch.tensor([sequence.root_token for sequence in active], device=self.device)
        block = self.model.embed_block(roots, self.target_model, num_slots)
        hidden = self.model(block, [sequence.drafter_state for sequence in active])
        logits = self.model.logits(hidden[:, 1:], self.target_model)  # slot 0 is the root itself
        drafted = iter(logits)
        return [
            self._candidates(sequence, next(drafted)[:depth]) if depth else None
            for sequence, depth in zip(sequences, depths, strict=True)
        ]

    def commit(self, sequences: SequenceOf[Sequence], features: SequenceOf[torch.Tensor | None]) -> None:
        """The features of each path's rows become context."""
        for sequence, path_features in zip(sequences, features, strict=True):
            if sequence.drafts:
                self.absorb(sequence, path_features)

    def close(self, sequence: Sequence) -> None:
        sequence.drafter_state = None

    def _depth_limit(self, sequence: Sequence) -> int:
        """Depths worth drafting: within the block, the tree budget, and what may still be emitted."""
        if not sequence.drafts:
            return 0
        limit = min(self.block_size - 1, sequence.tree_budget, sequence.num_remaining - 1)
        if self.max_context is not None:
            limit = min(limit, self.max_context - 1 - sequence.context_length)
        return max(limit, 0)

    def _candidates(self, sequence: Sequence, logits: torch.Tensor) -> Candidates:
        noise = None
        if sequence.noise is not None:
            noise = sequence.noise(sequence.context_length + 1, 1 + len(logits))[: len(logits)]
        scores = rank_scores(sequence.adjust_draft(logits), sequence.request.sampling, noise)
        width = min(sequence.tree_budget, scores.shape[-1])
        log_probs, token_ids = scores.topk(width, dim=-1)
        return Candidates(token_ids.cpu().numpy(), log_probs.float().cpu().numpy())
