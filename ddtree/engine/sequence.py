"""A sequence: a request while it runs. Its tokens, what it remembers, what it may still do."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ddtree.engine.request import AUTO, Request, RequestStats
from ddtree.sampling.adjust import LogitAdjuster, forbid
from ddtree.sampling.logprobs import TokenLogprob
from ddtree.sampling.noise import gumbel_noise, noise_key
from ddtree.tree.draft_tree import DraftTree

GUESSED_NODES = 32  # of a tree under "auto", before anything is known of it
BUILT_PER_KEPT = 4  # nodes under a grammar; building one costs microseconds, verifying one far more


class NoiseWindow:
    """The request's Gumbel noise around the current position; rows that a later round needs again are kept."""

    def __init__(self, key: int, vocab_size: int, device: torch.device):
        self.key, self.vocab_size, self.device = key, vocab_size, device
        self.first = 0
        self.rows = torch.empty(0, vocab_size, device=device)

    def __call__(self, first: int, count: int) -> torch.Tensor:
        """`[count, V]` float32: the noise of the tokens at absolute positions first ... first + count - 1."""
        keep_from = first - self.first
        kept = self.rows[keep_from:] if 0 <= keep_from < len(self.rows) else self.rows[:0]
        if len(kept) < count:
            missing = np.arange(first + len(kept), first + count)
            kept = torch.cat([kept, gumbel_noise(self.key, missing, self.vocab_size, self.device)])
        self.first, self.rows = first, kept
        return kept[:count]


@dataclass(eq=False)
class Sequence:
    """Invariant between rounds: everything but the last token is committed, `context_length == len(token_ids) - 1`."""

    request_id: int
    request: Request
    tree_budget: int = 0  # of this round: clamped, 0 without a drafter; under "auto" planned anew each round
    conditioned: bool = False  # whether its trees are ranked with the adapter's scores
    spared: bool = False  # under "auto": not in the present rounds, whose batch is too large for it
    draft_depth: int | None = None  # most depths to draft in this round; None leaves it to the budget
    token_ids: list[int] = field(default_factory=list)  # prompt, then emitted
    noise: NoiseWindow | None = None  # None when greedy
    adjuster: LogitAdjuster | None = None  # None where the target's logits are taken as they are
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of tokens not yet emitted
    target_state: Any = None  # owned by the target: caches
    drafter_state: Any = None  # owned by the drafter; None when it never drafts
    pending_features: list[torch.Tensor] = field(default_factory=list)  # of plain rounds, not yet absorbed
    auto: Any = None  # owned by the auto budget; None with a pinned one
    num_prefilled: int = 0  # of `prefill_ids`, committed
    prefilling: bool = True
    boundaries: list[int] = field(default_factory=list)  # where its prefill stops to remember a hybrid's state, ascending
    pages: list[int] = field(default_factory=list)  # of the engine's account (engine.memory)
    loan: Any = None  # owned by the prefix cache over pools: what its caches will begin with
    suspect: bool = False  # a round that it took part in failed: the next one is its own
    stats: RequestStats = field(default_factory=RequestStats)
    submitted_at: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        self.token_ids = list(self.request.prompt_token_ids)
        self.ends_at = len(self.token_ids) + self.request.max_tokens  # tokens, prompt and all, after which it is over

    def open_noise(self, vocab_size: int, device: torch.device) -> None:
        """Key the noise by (seed, choice index, prompt); design.md §5."""
        if not self.request.sampling.greedy:
            request = self.request
            key = noise_key(request.seed, request.choice_index, request.prompt_token_ids)
            self.noise = NoiseWindow(key, vocab_size, device)

    def open_choice(self, vocab_size: int, device: torch.device) -> None:
        """What choosing its tokens needs: noise; penalties, bias and grammar."""
        self.open_noise(vocab_size, device)
        request = self.request
        if request.sampling.adjusted or request.grammar is not None:
            ends = request.eos_token_ids | request.stop_token_ids
            self.adjuster = LogitAdjuster(request.sampling, request.prompt_token_ids, ends, vocab_size, device)

    def adjust(self, logits: torch.Tensor, token_ids: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        """The logits `[N, V]` after the nodes of a tree, as the request wants them weighed; its grammar speaks in `forbid`."""
        if self.adjuster is None:
            return logits
        self._follow()
        return self.adjuster(logits, token_ids, parents) if self.request.sampling.adjusted else logits

    def forbid(self, logits: torch.Tensor, path: SequenceOf[int]) -> torch.Tensor:
        """The logits `[1, V]` after the emitted tokens and then `path`, without what the grammar, if any, forbids there."""
        allowed = None if self.request.grammar is None else self.request.grammar.allowed_after(path)
        return logits if allowed is None else forbid(logits, allowed[None])

    def adjust_draft(self, logits: torch.Tensor) -> torch.Tensor:
        """The drafter's logits `[D, V]`, weighed as far as the history is known before the tree is."""
        if self.adjuster is None:
            return logits
        self._follow()
        allowed = None if self.request.grammar is None else self.request.grammar.allowed_after(())
        return self.adjuster.draft(logits, None if allowed is None else allowed[None])

    @property
    def build_budget(self) -> int:
        """Nodes to build before pruning: under a grammar more than the tree budget, as many will not fit."""
        return self.tree_budget * (BUILT_PER_KEPT if self.request.grammar is not None else 1)

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree without nodes that the grammar forbids, which could not be accepted; at most the tree budget."""
        if self.request.grammar is None:
            return tree
        self._follow()
        fits = np.flatnonzero(self.request.grammar.fits(tree.token_ids, tree.parents))
        return tree.take(fits[: self.tree_budget + 1])

    def _follow(self) -> None:
        self.adjuster.follow(self.token_ids)
        if self.request.grammar is not None:
            self.request.grammar.follow(self.token_ids[len(self.request.prompt_token_ids) :])

    @property
    def prefill_ids(self) -> list[int]:
        """What prefill has to commit: the prompt, or all but the last of what a preempted sequence had."""
        return self.token_ids[:-1] if self.num_emitted else self.token_ids

    @property
    def most_nodes(self) -> int:
        """Drafted nodes that its next round may verify."""
        if not self.stats.tree_budget:
            return 0
        if self.auto is not None:
            return self.auto.wanted
        return min(self.tree_budget, GUESSED_NODES) if self.stats.tree_budget == AUTO else self.tree_budget

    @property
    def root_token(self) -> int:
        return self.token_ids[-1]

    @property
    def context_length(self) -> int:
        return len(self.token_ids) - 1

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens it may still emit."""
        return self.ends_at - len(self.token_ids)

    @property
    def drafts(self) -> bool:
        return self.drafter_state is not None
