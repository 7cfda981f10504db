"""The obvious twins of the pooled kernels: one sequence at a time, by the single-sequence functions.

Arguments as in `pooled`. They look at the indices on the host; the kernels do not.
"""

from __future__ import annotations

import torch

from ddtree.kernels.gated_delta.sequence import gated_delta_commit, gated_delta_prefill, gated_delta_tree
from ddtree.kernels.gated_delta.staged import StagedRows


def tree(
    mixed, log_decay, beta, ancestor_mask, states, slots, starts, max_rows, shape, out, keys, solved, log_decays,
    row_slots=None,
) -> None:  # fmt: skip
    for slot, rows in _sequences(slots, starts):
        count = rows.stop - rows.start
        if count > max_rows:
            raise ValueError(f"a sequence has {count} rows, max_rows is {max_rows}")
        mask = None if ancestor_mask is None else ancestor_mask[rows, :count] != 0
        valid = None if row_slots is None else row_slots[rows] >= 0
        given = (*_heads(mixed[rows], shape), log_decay[rows], beta[rows])
        recalled, staged = gated_delta_tree(*given, mask, states[slot], valid)
        out[rows], keys[rows], solved[rows] = recalled, staged.keys, staged.solved
        log_decays[rows] = staged.log_decays


def step(mixed, log_decay, beta, states, slots, starts, shape, out) -> None:
    for slot, rows in _sequences(slots, starts):
        row = slice(rows.start, rows.start + 1)
        root = torch.zeros(1, dtype=torch.int64, device=mixed.device)
        given = (*_heads(mixed[row], shape), log_decay[row], beta[row], None, states[slot])
        out[row], staged = gated_delta_tree(*given)
        states[slot] = gated_delta_commit(states[slot], staged, root)


def commit(states, keys, solved, log_decays, slots, starts, path, path_lengths) -> None:
    for slot, rows, nodes in zip(slots.tolist(), _spans(starts), _paths(path, path_lengths), strict=True):
        for layer in range(states.shape[0]):
            staged = StagedRows(keys[layer, rows], solved[layer, rows], log_decays[layer, rows])
            states[layer, slot] = gated_delta_commit(states[layer, slot], staged, nodes)


def prefill(mixed, log_decay, beta, states, slots, starts, shape, out) -> None:
    for slot, rows in _sequences(slots, starts):
        given = (*_heads(mixed[rows], shape), log_decay[rows], beta[rows])
        out[rows], states[slot] = gated_delta_prefill(*given, states[slot])


def _heads(mixed: torch.Tensor, shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, 2 * Hk * K + Hv * V] -> query, key [n, Hk, K], value [n, Hv, V]."""
    keys_size = shape.num_key_heads * shape.key_dim
    query, key, value = mixed.split((keys_size, keys_size, shape.num_value_heads * shape.value_dim), dim=-1)
    by_head = (shape.num_key_heads, shape.key_dim)
    return query.unflatten(-1, by_head), key.unflatten(-1, by_head), value.unflatten(-1, (-1, shape.value_dim))


def _sequences(slots: torch.Tensor, starts: torch.Tensor) -> list[tuple[int, slice]]:
    """The slot and the rows of every sequence that has rows."""
    pairs = zip(slots.tolist(), _spans(starts), strict=True)
    return [(slot, rows) for slot, rows in pairs if rows.stop > rows.start]


def _spans(starts: torch.Tensor) -> list[slice]:
    bounds = starts.tolist()
    return [slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _paths(path: torch.Tensor, path_lengths: torch.Tensor) -> list[torch.Tensor]:
    return [nodes[:length].long() for nodes, length in zip(path, path_lengths.tolist(), strict=True)]
