"""The short causal convolution of one sequence: depthwise, over each row's own ancestors, then SiLU.

Letters: N tree rows, T consecutive rows, C channels, W kernel width (2 or more).
The last column of the weight belongs to the row itself, the one before to its parent, and so on; above the root come
the committed inputs, which are the state [W - 1, C], oldest first (zeros before the first token). Computed in fp32,
or fp64 when the rows are; the result has the rows' dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_conv_tree(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    parents: torch.Tensor | None,
) -> torch.Tensor:
    """Convolve `x` [N, C] by `weight` [C, W] (+ `bias` [C]) over each row's ancestors; returns [N, C].

    `parents` [N] int64, -1 for the root; None means consecutive rows. Rows are gathered, never multiplied by a
    mask, so a row that is nobody's ancestor (padding, NaN included) reaches nothing but itself.
    """
    num_rows, width = x.shape[0], weight.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(dtype).t().contiguous()
    history = torch.cat((state.to(x.dtype), x))
    # The state's rows and the staged ones in one sequence: row i lies at i + W - 1, the root's parent, -1, at the
    # newest row of the state. W - 1 steps up never leave it.
    if parents is None or num_rows == 1:
        windows = [history[tap : tap + num_rows] for tap in range(width)]
    else:
        places = _ancestors(parents, width)
        windows = [history.index_select(0, places[tap]) for tap in range(width)]
    total = windows[0].to(dtype) * taps[0]
    for window, tap in zip(windows[1:], taps[1:], strict=True):
        total = torch.addcmul(total, window.to(dtype), tap)
    if bias is not None:
        total = total + bias.to(dtype)
    return F.silu(total).to(x.dtype)


def causal_conv_commit(x: torch.Tensor, state: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """The state [W - 1, C] after the rows `path` ([p] int64, root first) of `x` [N, C]: the last W - 1 inputs.

    An empty path gives `state` itself.
    """
    kept, length = state.shape[0], path.shape[0]
    if length == 0:
        return state
    # The tail of the path is enough, and where it is all of the rows they lie in order already.
    newest = x.index_select(0, path[-kept:]) if length < x.shape[0] else x[-kept:]
    return torch.cat((state[length:], newest.to(state.dtype)))


def causal_conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve T >= 1 consecutive rows `x` [T, C]; returns ([T, C], the state after them [W - 1, C])."""
    out = causal_conv_tree(x, weight, bias, state, None)
    return out, torch.cat((state[x.shape[0] :], x[-state.shape[0] :].to(state.dtype)))


def _ancestors(parents: torch.Tensor, width: int) -> torch.Tensor:
    """[W, N] int64: where each row's ancestors lie in state ++ rows, oldest first, the row itself last."""
    kept = width - 1
    device = parents.device
    # The parent of every place: the state's rows follow one another (the first has none and is never asked).
    up = torch.cat((torch.arange(-1, kept - 1, device=device), parents + kept))
    places = [torch.arange(kept, kept + parents.shape[0], device=device)]
    for _ in range(kept):
        places.append(up.index_select(0, places[-1]))
    return torch.stack(places[::-1])
