"""The gated delta rule token by token along paths: the same steps in the same order for a prompt, a plain step, a tree's
nodes and what is committed of them, so that a token's bits do not depend on how it was computed.

Letters as in the package, and L layers, S pool slots, R packed rows, U walks, P most steps of one. Each walk starts at a
slot's state and takes the rows of its path, first to last. A tree is walked from the committed state down to each leaf
(`leaf_walks`): steps that paths share are repeated for each, which costs time where the closed form costs bits. Index tensors
are int32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ddtree.kernels.gated_delta.pooled import HeadShape
from ddtree.kernels.gated_delta.walk_twin import walk as walk_twin

NODES = 0  # walk u is row u's lineage, and no state changes
TOKENS = 1  # every step's result is wanted, and the state after the last is kept
COMMITS = 2  # only the state is wanted


class Walks(NamedTuple):
    """Which rows are walked, from which state."""

    kind: int  # NODES, TOKENS or COMMITS
    slots: torch.Tensor  # [U]
    firsts: torch.Tensor  # [U]: the packed row of its sequence's local row 0
    paths: torch.Tensor  # [U, P] local rows; of NODES the path lies at the end of its line
    lengths: torch.Tensor  # [U]; 0: nothing to walk, and of NODES the row's result is 0; -1: nothing at all
    wanted: torch.Tensor | None = None  # [U], of NODES: the first step whose result is this walk's to write


def leaf_walks(lineage: torch.Tensor, row_slots: torch.Tensor, row_indices: torch.Tensor) -> Walks:
    """Of packed trees: each leaf is walked to, and writes the results of its ancestors up to the last that is not its parent's
    first child, so that each row is written once.

    Args:
        lineage: [R, A] of all rows (`lineage_pooled`), which holds every tree's paths whole.
        row_slots, row_indices: [R], -1 for padding; a row's place inside its sequence's rows.
    """
    num_rows, reach = lineage.shape
    device = lineage.device
    row = torch.arange(num_rows, device=device)
    first = row - row_indices
    alive = row_slots >= 0
    parents = lineage[:, -2]  # relative to the context length: a root's is below zero
    inner = alive & (parents >= 0)
    parent_rows = torch.where(inner, first + parents, num_rows)
    eldest = torch.full((num_rows + 1,), num_rows, device=device).scatter_reduce_(0, parent_rows, row, "amin")
    is_leaf, is_eldest = eldest[:-1] == num_rows, inner & (eldest[parent_rows] == row)
    on_path = lineage >= 0
    depths = on_path.sum(1)
    eldests = is_eldest[(first[:, None] + lineage).clamp_(min=0)]
    step = torch.arange(reach, device=device) - (reach - depths)[:, None]
    wanted = torch.where(on_path & ~eldests, step, 0).amax(1)
    lengths = torch.where(alive, torch.where(is_leaf, depths, -1), 0)
    return Walks(NODES, row_slots, first.int(), lineage, lengths.int(), wanted.int())


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
