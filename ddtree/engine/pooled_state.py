"""What the sequences of a graph-backed engine share on the device: slots, pages, roots, noise keys.

Letters: S slots, the last of them a dummy that padded places of a batch point to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree.caches.pages import PageAllocator
from ddtree.caches.pools import NULL_PAGE, PAGE_SIZE, PageTable
from ddtree.caches.shared import PageStore
from ddtree.engine.request import Request
from ddtree.models.conditioning import Conditioning
from ddtree.models.pooled_dflash import PooledDFlash
from ddtree.models.pooled_target import PooledTarget
from ddtree.sampling.noise import noise_key

MOST_STOPS = 16  # token ids that end a request, of those that the device looks out for
NEVER = 2**31 - 1  # a context length


@dataclass(eq=False)
class SlotState:
    """A sequence's place in the pools; what `Sequence.target_state` is in this engine."""

    slot: int
    stops: frozenset[int] = frozenset()  # at which the device itself ends it
    exact: bool = True  # whether the slot's states are those after its committed tokens, and of no round in vain


class PooledState:
    """Pools of a target and its drafter, and the per-slot values that a round reads and writes."""

    def __init__(
        self,
        model,
        drafter_model,
        num_sequences: int,
        num_tokens: int,
        max_context: int,
        max_rows: int,
        *,
        keeps_states: bool = False,
        conditioning: Conditioning | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """`num_tokens`: what the pages of all sequences together hold, beside one largest tree. `max_context`: of one sequence. `max_rows`: most
        rows that one verify may stage, over all sequences. `keeps_states`: a hybrid's states are wanted after its last
        token, so a slot must not go on beyond it."""
        device = model.device
        self.device, self.max_rows, self.conditioning = device, max_rows, conditioning
        self.dummy = num_sequences
        self.block_size = drafter_model.config.block_size if drafter_model is not None else 1
        # A round stages its rows behind the committed ones.
        self.most_staged = max(max_rows, self.block_size)
        num_pages = 1 + -(-(num_tokens + self.most_staged + self.block_size) // PAGE_SIZE)
        self.allocator = PageAllocator(num_pages - 1, PAGE_SIZE, first_page=NULL_PAGE + 1)
        self.table = PageTable(num_sequences + 1, max_context + self.most_staged + self.block_size, device)
        layers = drafter_model.config.target_layer_ids if drafter_model is not None else ()
        self.target = PooledTarget(
            model, layers, self.table, num_pages, max_rows, batch_invariant=batch_invariant, block_size=self.block_size
        )
        self.drafter = PooledDFlash(drafter_model, model, self.table, num_pages) if drafter_model is not None else None
        attention = (self.target.pool.attention, self.drafter.pool if self.drafter is not None else None)
        self.store = PageStore([pool for pool in attention if pool is not None], self.allocator)
        self.features = None
        if self.drafter is not None:
            self.features = torch.zeros(max_rows, self.target.feature_width, dtype=model.dtype, device=device)
        self.roots = torch.zeros(num_sequences + 1, dtype=torch.int64, device=device)
        self.noise_keys = torch.zeros(num_sequences + 1, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(num_sequences + 1, dtype=torch.float32, device=device)
        self.top_ks = torch.zeros(num_sequences + 1, dtype=torch.int32, device=device)
        self.top_ps = torch.ones(num_sequences + 1, dtype=torch.float64, device=device)
        self.min_ps = torch.zeros(num_sequences + 1, dtype=torch.float64, device=device)
        # Where a slot's request ends, by context length and by token; `ended` once it has. None where nobody asks.
        self.ends = self.stop_ids = self.ended = None
        if keeps_states and self.state_bytes:
            self.ends = torch.full((num_sequences + 1,), NEVER, dtype=torch.int32, device=device)
            self.stop_ids = torch.full((num_sequences + 1, MOST_STOPS), -1, dtype=torch.int64, device=device)
            self.ended = torch.zeros(num_sequences + 1, dtype=torch.bool, device=device)
        self._free = list(range(num_sequences))[::-1]

    @property
    def state_bytes(self) -> int:
        """Of a hybrid's states in one slot; 0 for a target that keeps rows alone."""
        recurrent = self.target.pool.recurrent
        return 0 if recurrent is None else recurrent.state_bytes

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

    def open(self) -> int:
        """A slot, without pages. MemoryError where none is free."""
        if not self._free:
            raise MemoryError("every slot of the pools is taken")
        slot = self._free.pop()
        self.target.pool.clear(slot)
        return slot

    def begin(self, request: Request) -> SlotState:
        """A slot for a request: how it draws, and where it ends."""
        slot = self.open()
        sampling = request.sampling
        self.temperatures[slot] = sampling.temperature
        self.top_ks[slot] = min(sampling.top_k, self.target.config.vocab_size)  # requests may say any number, int32 holds less
        self.top_ps[slot], self.min_ps[slot] = sampling.top_p, sampling.min_p
        if not sampling.greedy:
            key = noise_key(request.seed, request.choice_index, request.prompt_token_ids)
            self.noise_keys[slot] = key - (1 << 64) if key >> 63 else key
        stops = request.eos_token_ids | request.stop_token_ids
        stops = stops if len(stops) <= MOST_STOPS else frozenset()
        if self.ends is not None:
            self.ends[slot] = len(request.prompt_token_ids) + request.max_tokens - 1
            self.stop_ids[slot] = torch.tensor([*stops, *[-1] * (MOST_STOPS - len(stops))], device=self.device)
            self.ended[slot] = False
        return SlotState(slot, stops)

    def close(self, slot: int) -> None:
        """Give the slot back; its pages are its sequence's to release."""
        self.table.take(slot)
        self._free.append(slot)
