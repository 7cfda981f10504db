"""The short convolution of all sequences of a round, over a pool of states: kernels on CUDA, else the twins.

Letters as in the package, and S pool slots, B sequences, R packed rows, L layers, P most nodes of a path. `x` may be
columns of something wider: its rows are [C] in one piece at any stride. Sequence b owns the rows starts[b] ...
starts[b + 1] - 1 and the state in slot slots[b]; it may have no rows. Rows from starts[B] on are padding: whatever
they hold, NaN included, reaches nothing, and nothing is written for them. Index tensors are int32. No value on the
device is looked at by the host, nothing is allocated: calls may be part of a CUDA graph.

`gates`: computed in the same launch, for all R rows of it.
"""

from __future__ import annotations

import torch

from ddtree.kernels.causal_conv import pooled_twins
from ddtree.kernels.causal_conv.gates import Gates


def causal_conv_tree_pooled(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    row_slots: torch.Tensor,
    row_indices: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor,
    gates: Gates | None = None,
) -> None:
    """Convolve `x` [R, C] by `weight` [C, W] (+ `bias` [C]) over each row's ancestors, then the committed inputs of
    its sequence in `states` [S, W - 1, C], which stay; written: `out` [R, C].

    `row_slots` [R]: the slot of each row, -1 for padding; `row_indices` [R]: its place in its sequence; `parents`
    [R]: its parent's place, -1 for the root; None means consecutive rows. Padding rows of `out` become finite, whatever
    it held: the recurrence multiplies them by zero.
    """
    _check(x, weight, states, out)
    run = pooled_twins.tree
    if x.is_cuda:
        from ddtree.kernels.causal_conv.triton_rows import tree as run
    run(x, weight, bias, states, slots, starts, row_slots, row_indices, parents, out, gates)


def causal_conv_step_pooled(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    gates: Gates | None = None,
) -> None:
    """Plain decoding: one row per sequence, row starts[b], committed at once: `states` and `out` are written."""
    _check(x, weight, states, out)
    run = pooled_twins.step
    if x.is_cuda:
        from ddtree.kernels.causal_conv.triton_state import step as run
    run(x, weight, bias, states, slots, starts, out, gates)


def causal_conv_commit_pooled(
    x: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
    path_lengths: torch.Tensor,
) -> None:
    """The last W - 1 inputs of the state and the accepted path, all layers at once: `states` [L, S, W - 1, C] are
    written from `x` [L, R, C]. `path` [B, P]: nodes in their sequence's numbering, root first; `path_lengths` [B].
    """
    if states.dim() != 4 or states.shape[::3] != x.shape[::2] or not states[0].is_contiguous():
        raise ValueError(f"x [L, R, C] and states [L, S, W - 1, C] differ: {list(x.shape)}, {list(states.shape)}")
    run = pooled_twins.commit
    if x.is_cuda:
        from ddtree.kernels.causal_conv.triton_state import commit as run
    run(x, states, slots, starts, path, path_lengths)


def causal_conv_prefill_pooled(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    max_rows: int,
    out: torch.Tensor,
    gates: Gates | None = None,
) -> None:
    """Consecutive tokens of each sequence, of none more than `max_rows`, committed at once: `states` and `out` [R, C]
    are written; a sequence without a row keeps its state.
    """
    _check(x, weight, states, out)
    run = pooled_twins.prefill
    if x.is_cuda:
        from ddtree.kernels.causal_conv.triton_rows import prefill as run
    run(x, weight, bias, states, slots, starts, max_rows, out, gates)


def _check(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, out: torch.Tensor) -> None:
    """ValueError where the tensors do not belong together: a kernel would read past their ends."""
    channels, width = weight.shape
    if x.shape[1] != channels or x.stride(1) != 1:
        raise ValueError(f"x must be [R, {channels}] with rows in one piece, as weight, got {list(x.shape)}")
    if states.shape[1:] != (width - 1, channels) or not states[0].is_contiguous():
        raise ValueError(f"states must be [S, {width - 1}, {channels}], contiguous, got {list(states.shape)}")
    if out.shape[0] < x.shape[0] or out.shape[1] != channels or out.stride(1) != 1:
        raise ValueError(f"out must be [>= {x.shape[0]}, {channels}], got {list(out.shape)}")
