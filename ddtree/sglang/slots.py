"""The drafter's context beside SGLang's KV pool: a token's rows lie under the slot that SGLang gave the token.

So whatever SGLang does with slots, sharing prefixes by its radix tree among it, holds for the drafter as well, and there
is no cache of a request to open, copy or drop. L layers, S slots, T context tokens, n rows, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

import torch

from ddtree.models.dflash import DFlash

PADDING_SLOT = 0  # of SGLang's pools: what nobody reads goes there


class SlotPool:
    """Keys and values [L, S, Hkv, D] of every token that the target has committed, by slot; behind them `num_staged` rows more,
    for blocks in flight."""

    def __init__(self, model: DFlash, num_slots: int, num_staged: int = 0) -> None:
        config = model.config
        shape = (config.num_layers, num_slots + num_staged, config.num_kv_heads, config.head_dim)
        self.model, self.first_staged = model, num_slots
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros(shape, dtype=model.dtype, device=model.device)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def key_pages(self) -> torch.Tensor:
        """The keys as pages of one token, [L, S, 1, Hkv, D], as `PooledDFlash` reads pools."""
        return self.keys.unsqueeze(2)

    @property
    def value_pages(self) -> torch.Tensor:
        return self.values.unsqueeze(2)

    @torch.no_grad()
    def absorb(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Key and value the target features [T, F] of committed tokens at `positions` [T], under `slots` [T]."""
        keys, values = self.model.project_context(features.to(self.model.dtype), positions)
        self.keys[:, slots] = keys
        self.values[:, slots] = values


class SlotContext:
    """One sequence's committed tokens in a `SlotPool`, as `DFlash.forward` reads caches; it stages, nothing stays."""

    def __init__(self, pool: SlotPool, slots: torch.Tensor) -> None:
        self.context_length = len(slots)
        self.layers = tuple(SlotLayer(keys, values, slots) for keys, values in zip(pool.keys, pool.values, strict=True))

    def commit(self, path: torch.Tensor) -> None:
        """The block leaves no trace: only `SlotPool.absorb` writes."""
        assert len(path) == 0, "a block of the drafter is never committed"


class SlotLayer:
    """One layer of a `SlotContext`."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self.keys, self.values, self.slots = keys, values, slots

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The context and behind it `keys` and `values` [n, Hkv, D]: both [Hkv, T + n, D]."""
        context = ((self.keys, keys), (self.values, values))
        seen = (torch.cat([rows[self.slots], new]).transpose(0, 1) for rows, new in context)
        return tuple(seen)
