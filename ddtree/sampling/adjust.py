"""One request's changes to the target's logits before a token is chosen, per node along its own path (design.md §5).

In this order: repetition penalty, frequency and presence penalty, bias, then the tokens that cannot be chosen here at
-inf: one that would end the generation before `min_tokens`, and (`forbid`) one that the grammar rules out. A node's history is the
prompt, the emitted tokens and its own ancestors, so plain decoding and every tree give the same numbers bit by bit.

Letters: N nodes, V vocabulary, K pairs of a node and a token on its path.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from ddtree.sampling.params import SamplingParams


class LogitAdjuster:
    """Follows one generation. The history shared by all nodes is counted once per emitted token, never per round."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        end_token_ids: Collection[int],
        vocab_size: int,
        device: torch.device,
    ):
        self._params, self._device = params, device
        self._num_prompt = self._num_followed = len(prompt_token_ids)
        self._ends = torch.tensor(sorted(end_token_ids), dtype=torch.long, device=device)
        self._counts = torch.zeros(vocab_size, device=device)  # times emitted; exact in float32 below 2^24
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if params.repetition_penalty != 1:
            self._in_prompt[torch.tensor(list(prompt_token_ids), dtype=torch.long, device=device)] = True
        self._bias: Tensor | None = None
        if params.logit_bias:
            token_ids, biases = zip(*params.logit_bias, strict=True)
            self._bias = torch.zeros(vocab_size, device=device)
            self._bias[torch.tensor(token_ids, device=device)] = torch.tensor(biases, device=device)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Count what was emitted since the last call; `token_ids` is prompt and output so far, which only grow."""
        new = token_ids[self._num_followed :]
        self._num_followed = len(token_ids)
        if new and self._params.penalised:
            index = torch.tensor(new, dtype=torch.long, device=self._device)
            self._counts.index_add_(0, index, torch.ones(len(new), device=self._device))

    def __call__(self, logits: Tensor, token_ids: np.ndarray, parents: np.ndarray) -> Tensor:
        """`logits [N, V]` after each node of a tree (`token_ids`, `parents [N]`, node 0 the last emitted token).

        Returns new float32 logits.
        """
        walk = _walk(parents)
        adjusted = self._weigh(logits)
        if self._params.penalised and len(parents) > 1:
            self._weigh_paths(logits, adjusted, token_ids, walk)
        self._forbid_ends(
            adjusted, np.bincount(np.concatenate([nodes for nodes, _ in walk]), minlength=len(parents)) - 1
        )
        return adjusted

    def draft(self, logits: Tensor, allowed: np.ndarray | None = None) -> Tensor:
        """The drafter's logits `[D, V]`, row d for the token at depth d + 1: as above, but the path is not known yet.

        `allowed [1, ceil(V / 8)]` is the grammar's word on depth 1.
        """
        adjusted = self._weigh(logits)
        self._forbid_ends(adjusted, np.arange(len(logits)))
        if allowed is not None:
            adjusted[:1] = forbid(adjusted[:1], allowed)
        return adjusted

    def _weigh(self, logits: Tensor) -> Tensor:
        """Penalties and bias for the history that all nodes share."""
        adjusted = self._penalise(logits.float(), self._counts, self._in_prompt)
        if self._bias is not None:
            adjusted = adjusted + self._bias
        return adjusted.clone() if adjusted is logits else adjusted

    def _weigh_paths(self, logits: Tensor, adjusted: Tensor, token_ids: np.ndarray, walk) -> None:
        """Correct the K entries whose token lies on the node's path: the same arithmetic with the path's counts."""
        vocab_size = logits.shape[-1]
        # The root is emitted and counted already.
        keys = [
            nodes * vocab_size + token_ids[ancestors] for nodes, ancestors in ((n[a > 0], a[a > 0]) for n, a in walk)
        ]
        keys, counts = np.unique(np.concatenate(keys), return_counts=True)
        rows, columns = (torch.from_numpy(each).to(self._device) for each in np.divmod(keys, vocab_size))
        counts = self._counts[columns] + torch.from_numpy(counts).to(self._device)
        values = self._penalise(logits[rows, columns].float(), counts, self._in_prompt[columns])
        if self._bias is not None:
            values = values + self._bias[columns]
        adjusted[rows, columns] = values

    def _penalise(self, values: Tensor, counts: Tensor, in_prompt: Tensor) -> Tensor:
        """Elementwise, one rounding per operation: a fused one could differ between a row and a handful of entries."""
        params = self._params
        if params.repetition_penalty != 1:
            seen = in_prompt | (counts > 0)
            weaker = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
            values = torch.where(seen, weaker, values)
        if params.frequency_penalty:
            values = values - counts * params.frequency_penalty
        if params.presence_penalty:
            values = values - (counts > 0) * params.presence_penalty
        return values

    def _forbid_ends(self, adjusted: Tensor, depths: np.ndarray) -> None:
        """-inf for what would end the generation as one of the first `min_tokens` tokens."""
        early = self._num_followed - self._num_prompt + depths < self._params.min_tokens
        if early.any() and len(self._ends):
            rows = torch.from_numpy(np.flatnonzero(early)).to(self._device)
            adjusted[rows[:, None], self._ends] = -math.inf


def forbid(logits: Tensor, allowed: np.ndarray) -> Tensor:
    """`logits [N, V]` with -inf where `allowed [N, ceil(V / 8)]` uint8 has no bit (bit v, least significant first)."""
    banned = np.unpackbits(~allowed, axis=-1, count=logits.shape[-1], bitorder="little").view(bool)
    return logits.masked_fill(torch.from_numpy(banned).to(logits.device), -math.inf)


def _walk(parents: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs (nodes, ancestors), int64, one pair of arrays per step up: at step s each node that has it meets its
    ancestor s levels above; step 0 is the node itself."""
    nodes = ancestors = np.arange(len(parents), dtype=np.int64)
    steps = []
    while len(nodes):
        steps.append((nodes, ancestors))
        above = parents[ancestors].astype(np.int64)
        nodes, ancestors = nodes[above >= 0], above[above >= 0]
    return steps
