"""The gated delta rule of one sequence: a whole draft tree in closed form, its commit, and prefill in chunks.

Letters: N tree rows, T prompt tokens, Hk key heads, Hv value heads (value head h uses key head h // (Hv / Hk)),
K key dim, V value dim. Per value head, with the state S [K, V],

    S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q

where q and k are L2-normalised and q is scaled by K^-1/2, both here. Computed in the state's dtype (fp32; fp64 in
tests) whatever the inputs' is; the result has the value's dtype. The derivation is in `closed_form`.
"""

from __future__ import annotations

import torch

from ddtree.kernels.gated_delta import closed_form
from ddtree.kernels.gated_delta.staged import StagedRows

CHUNK = 64  # prompt tokens solved at once; the work per token grows with it, the number of steps falls


def gated_delta_tree(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    ancestor_mask: torch.Tensor | None,
    state: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, StagedRows]:
    """Run every row from its parent's state; `state` [Hv, K, V] is the committed one and is left alone.

    `query`, `key` [N, Hk, K], `value` [N, Hv, V], `g` (log decay, <= 0) and `beta` [N, Hv]. Row i continues from
    the rows j with `ancestor_mask[i, j]` ([N, N] bool, itself included, parents before children); None means
    consecutive rows. Rows where `valid` ([N] bool) is false are padding: whatever they hold, NaN included, reaches
    nothing, and their result is 0.

    Returns (out [N, Hv, V], what `gated_delta_commit` needs).
    """
    num_rows, dtype = key.shape[0], state.dtype
    if valid is not None:
        # By selection: NaN times 0 is NaN.
        query, key, value = (torch.where(valid[:, None, None], rows, 0) for rows in (query, key, value))
        g, beta = (torch.where(valid[:, None], rows, 0) for rows in (g, beta))
    probes = closed_form.normalised_probes(query, key, dtype)
    values, betas = value.to(dtype).transpose(0, 1), beta.to(dtype).t()
    if num_rows == 1:
        log_decays = g.double()
        out, solved = closed_form.step(probes, values, log_decays.t(), betas, state)
    else:
        if ancestor_mask is None:
            ancestor_mask = _causal(num_rows, key.device)
        if valid is not None:
            ancestor_mask = ancestor_mask & valid & valid[:, None]
        log_decays = ancestor_mask.double() @ g.double()
        out, solved = closed_form.solve(probes, values, log_decays.t(), betas, ancestor_mask, state)
    staged = StagedRows(probes[:, 0].transpose(0, 1), solved.transpose(0, 1), log_decays)
    return out.transpose(0, 1).to(value.dtype), staged


def gated_delta_commit(state: torch.Tensor, staged: StagedRows, path: torch.Tensor) -> torch.Tensor:
    """The state [Hv, K, V] after the staged rows `path` ([p] int64, first row to last), from the `state` that they
    were staged on. An empty path gives `state` itself. Waits for no device: only the path's length is looked at.
    """
    if path.shape[0] == 0:
        return state
    keys, solved, log_decays = staged.keys, staged.solved, staged.log_decays
    if staged.num_rows > 1:
        keys, solved, log_decays = (rows.index_select(0, path) for rows in (keys, solved, log_decays))
    return closed_form.fold(keys.transpose(0, 1), solved.transpose(0, 1), log_decays.t(), state)


def gated_delta_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run T >= 1 consecutive rows, `chunk` at a time: arguments as in `gated_delta_tree`, N being T.

    Returns (out [T, Hv, V], the state [Hv, K, V] after the last row). Where the chunks are cut changes the result
    by rounding only.
    """
    num_rows, dtype = key.shape[0], state.dtype
    probes = closed_form.normalised_probes(query, key, dtype)
    values, betas, g = value.to(dtype).transpose(0, 1), beta.to(dtype).t(), g.double().t()
    causal = _causal(min(chunk, num_rows), key.device)
    outs = []
    for start in range(0, num_rows, chunk):
        rows = slice(start, min(start + chunk, num_rows))
        mask = causal[: rows.stop - start, : rows.stop - start]
        log_decays = g[:, rows].cumsum(dim=1)
        out, solved = closed_form.solve(
            probes[:, :, rows], values[:, rows], log_decays, betas[:, rows], mask, state
        )
        state = closed_form.fold(probes[:, 0, rows], solved, log_decays, state)
        outs.append(out)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    return out.transpose(0, 1).to(value.dtype), state


def _causal(num_rows: int, device: torch.device) -> torch.Tensor:
    """[n, n] bool: the ancestor mask of consecutive rows."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril_()
