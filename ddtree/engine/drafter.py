"""The drafter: absorb target features, draft a block, hand out the best candidates per depth."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from ddtree.engine.scoring import condition
from ddtree.engine.sequence import Sequence
from ddtree.models.conditioning import Conditioning
from ddtree.sampling.choose import rank_scores
from ddtree.tree.build import Candidates
from ddtree.tree.conditioned import ConditionedCandidates

MOST_PENDING = 32  # rows of features that wait at most; absorbing many at once costs little more than one


class Drafter:
    """Runs a DFlash model beside its target, whose embedding and head it borrows (arXiv 2602.06036, §3)."""

    def __init__(self, model, target_model, conditioning: Conditioning | None = None):
        self.model = model
        self.target_model = target_model
        self.conditioning = conditioning  # None: the drafter's own, factorised scores
        self.device = next(model.parameters()).device

    @property
    def block_size(self) -> int:
        return self.model.config.block_size

    @property
    def shrinkable_block(self) -> bool:
        """Whether a draft may fill fewer slots than the block has."""
        return self.model.config.shrinkable_block

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
        pending, sequence.pending_features = sequence.pending_features, []
        self.model.absorb(torch.cat([*pending, features]) if pending else features, sequence.drafter_state)

    def absorb_together(self, sequences: SequenceOf[Sequence], features: SequenceOf[torch.Tensor]) -> None:
        """Take in the features [T, F] of each sequence's newly committed prompt tokens."""
        for sequence, rows in zip(sequences, features, strict=True):
            self.absorb(sequence, rows)

    @torch.inference_mode()
    def draft(self, sequences: SequenceOf[Sequence]) -> list[Candidates | ConditionedCandidates | None]:
        """One block for every sequence that drafts; its candidates are ranked with the request's own noise."""
        depths = [self.depth_limit(sequence) for sequence in sequences]
        active = [sequence for sequence, depth in zip(sequences, depths, strict=True) if depth]
        if not active:
            return [None] * len(sequences)
        for sequence in active:
            self._catch_up(sequence)
        num_slots = self.block_size
        if self.model.config.shrinkable_block:
            num_slots = min(num_slots, 1 + max(depths))
        drafted = iter(zip(*self.draft_blocks(active, num_slots), strict=True))
        return [
            self._candidates(sequence, *next(drafted), depth) if depth else None
            for sequence, depth in zip(sequences, depths, strict=True)
        ]

    def draft_blocks(self, sequences: SequenceOf[Sequence], num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A block of `num_slots` for each sequence, slot 0 being the root itself: states [B, K, C], logits [B, K - 1, V]."""
        roots = torch.tensor([sequence.root_token for sequence in sequences], device=self.device)
        block = self.model.embed_block(roots, self.target_model, num_slots)
        states = self.model(block, [sequence.drafter_state for sequence in sequences])
        return states, self.model.logits(states[:, 1:], self.target_model)

    def commit(self, sequences: SequenceOf[Sequence], features: SequenceOf[torch.Tensor | None]) -> None:
        """The features of each path's rows become context; those of plain rounds once there are many, or at the next
        draft, so that a plain round costs no more for having a drafter."""
        for sequence, path_features in zip(sequences, features, strict=True):
            if not sequence.drafts:
                continue
            if sequence.tree_budget:
                self.absorb(sequence, path_features)
                continue
            sequence.pending_features.append(path_features)
            if len(sequence.pending_features) >= MOST_PENDING:
                self._catch_up(sequence)

    def close(self, sequence: Sequence) -> None:
        sequence.drafter_state, sequence.pending_features = None, []

    def _catch_up(self, sequence: Sequence) -> None:
        if sequence.pending_features:
            pending, sequence.pending_features = torch.cat(sequence.pending_features), []
            self.absorb(sequence, pending)

    def depth_limit(self, sequence: Sequence) -> int:
        """Depths worth drafting: within the block, the tree budget, and what may still be emitted."""
        if not sequence.drafts:
            return 0
        limit = min(self.block_size - 1, sequence.tree_budget, sequence.num_remaining - 1)
        if sequence.draft_depth is not None:
            limit = min(limit, sequence.draft_depth)
        if self.max_context is not None:
            limit = min(limit, self.max_context - 1 - sequence.context_length)
        return max(limit, 0)

    def _candidates(self, sequence: Sequence, states: torch.Tensor, logits: torch.Tensor, depth: int):
        """The best tokens of the first `depth` depths, from one block's states [K, C] and logits [K - 1, V]."""
        noise, sampling = None, sequence.request.sampling
        if sequence.noise is not None:
            noise = sequence.noise(sequence.context_length + 1, 1 + depth)[:depth]
        logits = sequence.adjust_draft(logits[:depth])
        if self.conditioning is not None and sequence.conditioned and not sequence.spared:
            return condition(self.conditioning, states[: depth + 1], sequence.root_token, logits, sampling, noise)
        scores = rank_scores(logits, sampling, noise)
        width = min(sequence.tree_budget, scores.shape[-1])
        log_probs, token_ids = scores.topk(width, dim=-1)
        return Candidates(token_ids.cpu().numpy(), log_probs.float().cpu().numpy())
