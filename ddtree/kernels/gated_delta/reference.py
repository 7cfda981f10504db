"""The obvious twin of the gated delta kernels: one row at a time, each from its parent's state. Nobody optimises it.

Letters as in the package. In fp64 when the state is.
"""

from __future__ import annotations

import torch

from ddtree.kernels.gated_delta.staged import StagedRows


def gated_delta_tree_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    ancestor_mask: torch.Tensor | None,
    state: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, StagedRows]:
    """Same arguments and result as `gated_delta_tree`: out [N, Hv, V] and the staged rows."""
    num_rows, dtype = key.shape[0], state.dtype
    queries, keys, repeats = _normalise(query, key, state)
    out = torch.zeros(value.shape, dtype=dtype)
    solved = torch.zeros(value.shape, dtype=dtype)
    log_decays = torch.zeros(g.shape, dtype=torch.float64)
    states: list[torch.Tensor] = []
    for row in range(num_rows):
        if valid is not None and not valid[row]:
            keys[row] = 0
            states.append(state)
            continue
        parent = _parent(row, ancestor_mask)
        before = state if parent < 0 else states[parent]
        out[row], solved[row], after = _step(
            queries[row].repeat_interleave(repeats, 0),
            keys[row].repeat_interleave(repeats, 0),
            value[row].to(dtype),
            g[row].to(dtype),
            beta[row].to(dtype),
            before,
        )
        log_decays[row] = g[row].double() + (log_decays[parent] if parent >= 0 else 0)
        states.append(after)
    return out.to(value.dtype), StagedRows(keys, solved, log_decays)


def gated_delta_commit_reference(state: torch.Tensor, staged: StagedRows, path: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `gated_delta_commit`: the rows of the path written one after another."""
    repeats = state.shape[0] // staged.keys.shape[1]
    before = torch.zeros_like(staged.log_decays[0])
    for row in path.tolist():
        decay = (staged.log_decays[row] - before).exp().to(state.dtype)
        key = staged.keys[row].repeat_interleave(repeats, 0)
        state = decay[:, None, None] * state + key.unsqueeze(-1) * staged.solved[row].unsqueeze(-2)
        before = staged.log_decays[row]
    return state


def gated_delta_prefill_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and result as `gated_delta_prefill`; there are no chunks."""
    dtype = state.dtype
    queries, keys, repeats = _normalise(query, key, state)
    out = torch.zeros(value.shape, dtype=dtype)
    for row in range(key.shape[0]):
        out[row], _, state = _step(
            queries[row].repeat_interleave(repeats, 0),
            keys[row].repeat_interleave(repeats, 0),
            value[row].to(dtype),
            g[row].to(dtype),
            beta[row].to(dtype),
            state,
        )
    return out.to(value.dtype), state


def _step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`query`, `key` [Hv, K], `value` [Hv, V], `g`, `beta` [Hv], `state` [Hv, K, V] -> (o, u, the new state)."""
    state = g.exp()[:, None, None] * state
    recalled = (state * key.unsqueeze(-1)).sum(dim=1)
    solved = beta.unsqueeze(-1) * (value - recalled)
    state = state + key.unsqueeze(-1) * solved.unsqueeze(-2)
    return (state * query.unsqueeze(-1)).sum(dim=1), solved, state


def _parent(row: int, ancestor_mask: torch.Tensor | None) -> int:
    """The last ancestor before `row`, since parents precede children; -1 when it has none."""
    if ancestor_mask is None:
        return row - 1
    before = ancestor_mask[row, :row].nonzero()
    return int(before[-1]) if len(before) else -1


def _normalise(
    query: torch.Tensor, key: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """L2-normalise `query` and `key` [N, Hk, K], scale the query; how many value heads share a key head."""
    query, key = query.to(state.dtype), key.to(state.dtype)
    query = query / (query.square().sum(-1, keepdim=True) + 1e-6).sqrt() / key.shape[-1] ** 0.5
    key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return query, key, state.shape[0] // key.shape[1]
