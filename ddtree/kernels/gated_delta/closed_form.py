"""The closed form of the gated delta rule over rows that each continue from an earlier row (design.md §3).

Letters: n rows, Hk key heads, Hv value heads (r = Hv / Hk value heads share a key head), K key dim, V value dim.
Everything here has heads first and is in the state's dtype (fp32, or fp64 in tests), `c` excepted. With

    D[i, j] = exp(c_i - c_j) where j is i or an ancestor of i, else 0

the rows are solved all at once and no state per row is ever formed:

    (I + strict(diag(beta) (K K^T) o D)) U = diag(beta) (V - exp(c) o (K S))
    O = exp(c) o (Q S) + ((Q K^T) o D) U

Matrix products assume IEEE fp32, which is PyTorch's default: TF32 would cost three digits.
"""

from __future__ import annotations

import torch

L2_EPS = 1e-6  # inside the root, as the published models have it


def normalised_probes(query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`query`, `key` [n, Hk, K] -> L2-normalised in `dtype`, heads first: [Hk, 2, n, K], the keys before the queries.

    Both together, so that the state is read once for both. The queries' K^-1/2 is applied to what comes out.
    """
    probes = torch.stack((key, query)).to(dtype)
    probes = probes * torch.rsqrt((probes * probes).sum(dim=-1, keepdim=True) + L2_EPS)
    return probes.permute(2, 0, 1, 3)


def step(
    probes: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row, the recurrence itself: `probes` [Hk, 2, 1, K], `value` [Hv, 1, V], `log_decay` [Hv, 1] fp64,
    `beta` [Hv, 1], `state` [Hv, K, V] -> (out, u), each [Hv, 1, V]. Commit forms the new state.
    """
    num_key_heads, _, _, key_dim = probes.shape
    recalled = _recall(probes, state) * log_decay.exp().to(state.dtype).unsqueeze(-1)
    solved = beta.unsqueeze(-1) * (value - recalled[:, :1])
    overlap = (probes[:, 0] * probes[:, 1]).sum(dim=-1, keepdim=True)
    overlap = _per_value_head(overlap, state.shape[0] // num_key_heads)
    return (recalled[:, 1:] + overlap * solved) * key_dim**-0.5, solved


def solve(
    probes: torch.Tensor,
    value: torch.Tensor,
    log_decays: torch.Tensor,
    beta: torch.Tensor,
    ancestor_mask: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows at once: `probes` [Hk, 2, n, K], `value` [Hv, n, V], `log_decays` [Hv, n] fp64, `beta` [Hv, n],
    `ancestor_mask` [n, n] bool, `state` [Hv, K, V] -> (out, U), each [Hv, n, V].
    """
    num_key_heads, _, num_rows, key_dim = probes.shape
    num_value_heads = value.shape[0]
    square = (num_value_heads, num_rows, num_rows)
    by_key, by_query = _recall(probes, state).split(num_rows, dim=1)
    mask = ancestor_mask.to(state.dtype)
    decay = _decay_between(log_decays, mask).view(num_key_heads, -1, num_rows, num_rows)
    # Everything here is finite, so the mask's zeros give exact zeros: what is no ancestor moves nothing by a bit.
    products = torch.matmul(probes, probes[:, :1].transpose(-1, -2)) * mask
    decay_from_state = log_decays.exp().to(state.dtype).unsqueeze(-1)
    beta = beta.unsqueeze(-1)
    right_side = beta * (value - decay_from_state * by_key)
    # The solver reads neither the diagonal nor what lies above it.
    system = (products[:, :1] * decay).reshape(square) * beta
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    attention = (products[:, 1:] * decay).reshape(square)
    scale = key_dim**-0.5
    out = torch.baddbmm(decay_from_state * by_query, attention, solved, beta=scale, alpha=scale)
    return out, solved


def fold(
    key: torch.Tensor, solved: torch.Tensor, log_decays: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The state after a path of p rows: `key` [Hk, p, K], `solved` [Hv, p, V], `log_decays` [Hv, p] fp64,
    `state` [Hv, K, V] before it -> [Hv, K, V].

        S <- exp(c_last) S + sum_j exp(c_last - c_j) k_j u_j^T
    """
    last = log_decays[:, -1:]
    weighted = solved * (last - log_decays).exp().to(state.dtype).unsqueeze(-1)
    keys = _per_value_head(key.transpose(1, 2), state.shape[0] // key.shape[0])
    return torch.baddbmm(state * last.exp().to(state.dtype).unsqueeze(-1), keys, weighted)


def _recall(probes: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """What the state [Hv, K, V] holds at `probes` [Hk, 2, n, K]: [Hv, 2n, V], by the keys, then by the queries."""
    num_key_heads, _, num_rows, key_dim = probes.shape
    by_key_head = state.view(num_key_heads, -1, key_dim, state.shape[-1])
    recalled = torch.matmul(probes.reshape(num_key_heads, 1, 2 * num_rows, key_dim), by_key_head)
    return recalled.view(state.shape[0], 2 * num_rows, state.shape[-1])


def _decay_between(log_decays: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """D [Hv, n, n] in the dtype of `mask` ([n, n], 1 for ancestors), from `log_decays` [Hv, n] fp64; 1 where
    the mask is 0.
    """
    # Differences in fp64: in fp32 a strong decay early on the path would swamp the weak ones after it. Masked
    # before the exp: between rows that are not on one path the difference can be large and positive.
    differences = (log_decays.unsqueeze(2) - log_decays.unsqueeze(1)).to(mask.dtype)
    return differences.mul_(mask).exp_()


def _per_value_head(by_key_head: torch.Tensor, repeats: int) -> torch.Tensor:
    """[Hk, a, b] -> [Hv, a, b]: consecutive value heads share a key head."""
    num_key_heads, *shape = by_key_head.shape
    return by_key_head.unsqueeze(1).expand(-1, repeats, -1, -1).reshape(num_key_heads * repeats, *shape)
