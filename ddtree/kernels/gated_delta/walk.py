"""The gated delta rule token by token along paths: the same steps in the same order for a prompt, a plain step, a tree's
nodes and what is committed of them, so that a token's bits do not depend on how it was computed.

Letters as in the package, and L layers, S pool slots, R packed rows, U walks, P most steps of one. Each walk starts at a
slot's state and takes the rows of its path, first to last. A tree's node is a walk of its own, from the committed state
down its ancestors: their steps are repeated for each, which costs time where the closed form costs bits. Index tensors are int32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ddtree.kernels.gated_delta.pooled import HeadShape
from ddtree.kernels.gated_delta.walk_twin import walk as walk_twin

NODES = 0  # each walk is one row's lineage: its last step's result is the row's, and no state changes
TOKENS = 1  # every step's result is wanted, and the state after the last is kept
COMMITS = 2  # only the state is wanted


class Walks(NamedTuple):
    """Which rows are walked, from which state."""

    kind: int  # NODES, TOKENS or COMMITS
    slots: torch.Tensor  # [U]
    firsts: torch.Tensor  # [U]: the packed row of its sequence's local row 0
    paths: torch.Tensor  # [U, P] local rows; NODES: walk u is row u's, and the path lies at the end of its line
    lengths: torch.Tensor  # [U]; 0: nothing to walk, and for NODES the result is 0


def gated_delta_walk_pooled(
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    walks: Walks,
    shape: HeadShape,
    out: torch.Tensor | None = None,
) -> None:
    """Walk in all layers: `mixed` [L, R, 2 * Hk * K + Hv * V], `log_decay` and `beta` [L, R, Hv] fp32, `states`
    [L, S, Hv, K, V] fp32, contiguous, the rows' in each layer. `out` [R, Hv, V] is written but for COMMITS, in one layer.
    """
    _check(mixed, log_decay, beta, states, walks, shape, out)
    run = walk_twin
    if mixed.is_cuda:
        from ddtree.kernels.gated_delta.triton_walk import walk as run
    run(mixed, log_decay, beta, states, walks, shape, out)


def _check(mixed, log_decay, beta, states, walks, shape, out) -> None:
    """ValueError where the tensors are not of `shape`: a kernel would read past their ends."""
    width = 2 * shape.num_key_heads * shape.key_dim + shape.num_value_heads * shape.value_dim
    if mixed.ndim != 3 or mixed.shape[2] != width or not mixed[0].is_contiguous():
        raise ValueError(f"mixed must be [L, R, {width}], rows one after another, got {list(mixed.shape)}")
    heads = (shape.num_value_heads, shape.key_dim, shape.value_dim)
    if states.shape[0] != mixed.shape[0] or states.shape[2:] != heads or not states.is_contiguous():
        raise ValueError(f"states must be [{mixed.shape[0]}, S, {', '.join(map(str, heads))}], contiguous, got {list(states.shape)}")
    for name, gate in (("log_decay", log_decay), ("beta", beta)):
        if gate.shape != (*mixed.shape[:2], shape.num_value_heads) or not gate[0].is_contiguous():
            raise ValueError(f"{name} must be {[*mixed.shape[:2], shape.num_value_heads]}, contiguous, got {list(gate.shape)}")
    if walks.kind != COMMITS and (out is None or mixed.shape[0] != 1 or not out.is_contiguous()):
        raise ValueError("out must be there, contiguous, and mixed of one layer, unless walks are COMMITS")
    if walks.paths.stride(1) != 1 and walks.paths.shape[1] > 1:
        raise ValueError(f"paths must be contiguous in their last dimension, strides are {walks.paths.stride()}")
