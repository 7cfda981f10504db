"""What the sequences of a graph-backed engine share on the device: slots, pages, roots, noise keys.

Letters: S slots, the last of them a dummy that padded places of a batch point to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree.caches.pages import PageAllocator
from ddtree.caches.pools import NULL_PAGE, PAGE_SIZE, PageTable
from ddtree.engine.request import Request
from ddtree.models.pooled_dflash import PooledDFlash
from ddtree.models.pooled_target import PooledTarget
from ddtree.sampling.noise import noise_key


@dataclass(eq=False)
class SlotState:
    """A sequence's place in the pools; what `Sequence.target_state` is in this engine."""

    slot: int


class PooledState:
    """Pools of a target and its drafter, and the per-slot values that a round reads and writes."""

    def __init__(self, model, drafter_model, num_sequences: int, num_tokens: int, max_context: int, max_rows: int) -> None:
        """`num_tokens`: what the pages of all sequences together hold. `max_context`: of one sequence. `max_rows`: most
        rows that one verify may stage, over all sequences."""
        device = model.device
        self.device, self.max_rows = device, max_rows
        self.dummy = num_sequences
        self.block_size = drafter_model.config.block_size if drafter_model is not None else 1
        # A round stages its rows behind the committed ones.
        self.most_staged = max(max_rows, self.block_size)
        num_pages = 1 + -(-num_tokens // PAGE_SIZE) + num_sequences * -(-self.most_staged // PAGE_SIZE)
        self.allocator = PageAllocator(num_pages, PAGE_SIZE)
        assert self.allocator.allocate(1) == [NULL_PAGE], "the first page is the null page"
        self.table = PageTable(num_sequences + 1, max_context + self.most_staged, device)
        layers = drafter_model.config.target_layer_ids if drafter_model is not None else ()
        self.target = PooledTarget(model, layers, self.table, num_pages, max_rows)
        self.drafter = PooledDFlash(drafter_model, model, self.table, num_pages) if drafter_model is not None else None
        self.features = None
        if self.drafter is not None:
            self.features = torch.zeros(max_rows, self.target.feature_width, dtype=model.dtype, device=device)
        self.roots = torch.zeros(num_sequences + 1, dtype=torch.int64, device=device)
        self.noise_keys = torch.zeros(num_sequences + 1, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(num_sequences + 1, dtype=torch.float32, device=device)
        self._free = list(range(num_sequences))[::-1]

    @property
    def drafter_context(self) -> int | None:
        """Positions the drafter was made for; None if it says nothing."""
        if self.drafter is None:
            return None
        config = self.drafter.config
        return min(filter(None, (config.max_position_embeddings, config.rope.context_limit)), default=None)

    @property
    def num_bytes(self) -> int:
        """Of all pools."""
        drafter = self.drafter.pool.num_bytes if self.drafter is not None else 0
        return self.target.pool.num_bytes + drafter

    def open(self, num_tokens: int) -> int:
        """A slot with pages for a sequence of up to `num_tokens` tokens. MemoryError where none is free."""
        if not self._free:
            raise MemoryError("every slot of the pools is taken")
        slot = self._free.pop()
        try:
            self.table.reserve(slot, num_tokens + self.most_staged, self.allocator)
        except MemoryError:
            self._free.append(slot)
            raise
        self.target.pool.clear(slot)
        return slot

    def set_sampling(self, slot: int, request: Request) -> None:
        """How the slot's sequence draws."""
        self.temperatures[slot] = request.sampling.temperature
        if not request.sampling.greedy:
            key = noise_key(request.seed, request.choice_index, request.prompt_token_ids)
            self.noise_keys[slot] = key - (1 << 64) if key >> 63 else key

    def close(self, slot: int) -> None:
        """Give the slot and its pages back."""
        self.table.release(slot, self.allocator)
        self._free.append(slot)
