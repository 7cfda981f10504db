"""The gated delta rule of all sequences of a round, in place over a pool of states: kernels on CUDA, else the twins.

Letters as in the package, and S pool slots, B sequences, R packed rows, N most rows of one sequence, L layers, P most
nodes of a path. Sequence b owns the rows starts[b] ... starts[b + 1] - 1 and the state in slot slots[b]; it may have
no rows. Rows from starts[B] on are padding: whatever they hold, NaN included, reaches nothing, and nothing is written
for them. `mixed` rows are queries, keys and values of all heads side by side, [2 * Hk * K + Hv * V], as the short
convolution leaves them. Index tensors are int32. No value on the device is looked at by the host, nothing is
allocated: calls may be part of a CUDA graph.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ddtree.kernels.gated_delta import pooled_twins


class HeadShape(Protocol):
    """The heads of a Gated-DeltaNet layer."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int


def gated_delta_tree_pooled(
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    ancestor_mask: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    max_rows: int,
    shape: HeadShape,
    out: torch.Tensor,
    keys: torch.Tensor,
    solved: torch.Tensor,
    log_decays: torch.Tensor,
    row_slots: torch.Tensor | None = None,
) -> None:
    """Run every row from its parent's state and stage what committing will need; `states` [S, Hv, K, V] stay.

    `mixed` [R, ...], `log_decay` (<= 0) and `beta` [R, Hv] fp32, `ancestor_mask` [R, >= max_rows] uint8: row r,
    column j says whether node j of the same sequence is r or its ancestor (parents before children); None means
    consecutive rows. No sequence may have more than `max_rows` rows. With `row_slots` [R], a sequence's rows may be
    followed by padding of its own, where it is -1: that reaches nothing either, and what is written for it is 0.

    Written: `out` [R, Hv, V]; staged [>= R, ...]: `keys` [Hk, K] L2-normalised and `solved` [Hv, V] fp32,
    `log_decays` [Hv] fp64, sums from the root.
    """
    _check_rows(mixed, shape, states, out)
    if ancestor_mask is not None and ancestor_mask.shape[1] < max_rows:
        raise ValueError(f"ancestor_mask has {ancestor_mask.shape[1]} columns, max_rows is {max_rows}: widen the mask")
    run = pooled_twins.tree
    if mixed.is_cuda:
        from ddtree.kernels.gated_delta.triton_tree import tree as run
    indices = (slots, starts, max_rows)
    staged = (keys, solved, log_decays)
    run(mixed, log_decay, beta, ancestor_mask, states, *indices, shape, out, *staged, row_slots=row_slots)


def gated_delta_step_pooled(
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    shape: HeadShape,
    out: torch.Tensor,
) -> None:
    """Plain decoding: one row per sequence, row starts[b], committed at once. `states` [S, Hv, K, V] and `out`
    [R, Hv, V] are written; a sequence without a row keeps its state. Otherwise as `gated_delta_tree_pooled`.
    """
    _check_rows(mixed, shape, states, out)
    run = pooled_twins.step
    if mixed.is_cuda:
        from ddtree.kernels.gated_delta.triton_state import step as run
    run(mixed, log_decay, beta, states, slots, starts, shape, out)


def gated_delta_commit_pooled(
    states: torch.Tensor,
    keys: torch.Tensor,
    solved: torch.Tensor,
    log_decays: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
    path_lengths: torch.Tensor,
) -> None:
    """Fold each sequence's accepted path into its states, all layers at once: `states` [L, S, Hv, K, V] are written.

    `keys`, `solved`, `log_decays` [L, R, ...] as staged; `path` [B, P]: nodes in their sequence's numbering, root
    first; `path_lengths` [B]. A path of length 0 leaves the state alone, bit for bit.
    """
    if states.dim() != 5:
        raise ValueError(f"states must be [L, S, Hv, K, V], got {list(states.shape)}: stack the layers")
    run = pooled_twins.commit
    if states.is_cuda:
        from ddtree.kernels.gated_delta.triton_state import commit as run
    run(states, keys, solved, log_decays, slots, starts, path, path_lengths)


def gated_delta_prefill_pooled(
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    shape: HeadShape,
    out: torch.Tensor,
) -> None:
    """Consecutive tokens of each sequence, committed at once; a sequence without a row keeps its state. `states`
    [S, Hv, K, V] and `out` [R, Hv, V] are written. Otherwise as `gated_delta_tree_pooled`.
    """
    _check_rows(mixed, shape, states, out)
    run = pooled_twins.prefill
    if mixed.is_cuda:
        from ddtree.kernels.gated_delta.triton_prefill import prefill as run
    run(mixed, log_decay, beta, states, slots, starts, shape, out)


def _check_rows(mixed: torch.Tensor, shape: HeadShape, states: torch.Tensor, out: torch.Tensor) -> None:
    """ValueError where the tensors are not of `shape`: a kernel would read past their ends."""
    width = 2 * shape.num_key_heads * shape.key_dim + shape.num_value_heads * shape.value_dim
    if mixed.shape[1] != width or mixed.stride(1) != 1:
        raise ValueError(f"mixed must be [R, {width}] with rows in one piece, got {list(mixed.shape)}")
    heads = (shape.num_value_heads, shape.key_dim, shape.value_dim)
    if states.shape[1:] != heads or not states[0].is_contiguous():
        raise ValueError(f"states must be [S, {', '.join(map(str, heads))}], contiguous, got {list(states.shape)}")
    if out.shape[0] < mixed.shape[0] or not out.is_contiguous():
        raise ValueError(f"out must have a contiguous row for each of {mixed.shape[0]}, got {list(out.shape)}")
