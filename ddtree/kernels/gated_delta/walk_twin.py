"""The obvious twin of the walks: one walk, one layer, one step after another."""

from __future__ import annotations

import torch

from ddtree.kernels.gated_delta.pooled_twins import _heads

L2_EPS = 1e-6


def walk(mixed, log_decay, beta, states, walks, shape, out) -> None:
    """Arguments as in `walk.gated_delta_walk_pooled`."""
    kind, slots, firsts, paths, lengths, wanted = walks
    for unit, (slot, first, length) in enumerate(zip(slots.tolist(), firsts.tolist(), lengths.tolist(), strict=True)):
        if slot < 0 or length <= 0:
            if kind == 0 and length >= 0:
                out[unit] = 0
            continue
        path = (paths[unit, -length:] if kind == 0 else paths[unit, :length]).tolist()
        for layer in range(states.shape[0]):
            state = states[layer, slot].clone()
            for number, local in enumerate(path):
                row = first + local
                state, result = step(mixed[layer, row], log_decay[layer, row], beta[layer, row], state, shape)
                if kind == 1 or (kind == 0 and number >= int(wanted[unit])):
                    out[row] = result
            if kind:
                states[layer, slot] = state


def step(mixed, log_decay, beta, state, shape) -> tuple[torch.Tensor, torch.Tensor]:
    """One row `mixed` [...] on `state` [Hv, K, V] -> the next state, the result [Hv, V]."""
    query, key, value = (part[0].float() for part in _heads(mixed[None], shape))
    each = shape.num_value_heads // shape.num_key_heads
    query, key = _unit(query), _unit(key)
    query, key = query.repeat_interleave(each, 0) * shape.key_dim**-0.5, key.repeat_interleave(each, 0)
    state = state * log_decay.exp()[:, None, None]
    solution = beta[:, None] * (value - (state * key[:, :, None]).sum(1))
    state = state + key[:, :, None] * solution[:, None]
    return state, (state * query[:, :, None]).sum(1).to(mixed.dtype)


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + L2_EPS)
