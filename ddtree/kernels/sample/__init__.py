"""One token per row from logits, greedy or with keyed Gumbel noise, for requests of any temperatures at once.

The noise is that of ddtree.sampling.noise: SplitMix64, one stream per (request, absolute position), the token id as its
counter, logarithms in fp64. So a draw is the same on the host and on the device, alone or in a batch, plain or in a
tree. A CUDA tensor goes to the Triton kernels, any other to the twin. Filters (top-k, top-p, min-p) are not here.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from ddtree.kernels.sample.reference import (
    choose_pooled_reference,
    rank_scores_pooled_reference,
    streams_pooled_reference,
)

__all__ = [
    "choose_pooled",
    "choose_pooled_reference",
    "rank_scores_pooled",
    "rank_scores_pooled_reference",
    "streams_pooled",
    "streams_pooled_reference",
]


def streams_pooled(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[R] int64: each row's noise stream, from its request's key (`keys` [R] int64, the 64 bits of `noise_key`) and the
    absolute position of the token to be drawn (`positions` [R] int32 or int64, >= 0).
    """
    if keys.shape != positions.shape or keys.dtype != torch.int64:
        raise ValueError(f"keys must be {list(positions.shape)} int64, got {list(keys.shape)} {keys.dtype}")
    if keys.is_cuda:
        from ddtree.kernels.sample.triton import streams_pooled_triton

        return streams_pooled_triton(keys, positions)
    return streams_pooled_reference(keys, positions)


def choose_pooled(logits: torch.Tensor, temperatures: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """[R] int64: the argmax of `logits` [R, V] where the temperature is 0, else of (logits - max) / T + noise.

    `temperatures` [R] float32, `streams` [R] int64 of `streams_pooled`. Ties go to the lowest id; a logit of -inf is
    never drawn. Rows of NaN (padding) give some id in range.
    """
    _check(logits, temperatures, streams)
    if logits.is_cuda:
        from ddtree.kernels.sample.triton import choose_pooled_triton

        return choose_pooled_triton(logits, temperatures, streams)
    return choose_pooled_reference(logits, temperatures, streams)


def rank_scores_pooled(
    logits: torch.Tensor, temperatures: torch.Tensor, streams: torch.Tensor
) -> torch.Tensor:
    """[R, V] float32: what the drafter ranks with, up to a constant per row; arguments as in `choose_pooled`.

    Temperature 0: the logits. Else 0.8 * (logits - max) / T + 0.67 * noise, with the noise that the target will draw
    with (ddtree.sampling.choose.rank_scores). On CUDA the noise is within 1e-5 of the exact one: a ranking moves
    acceptance, never the output.
    """
    _check(logits, temperatures, streams)
    if logits.is_cuda:
        from ddtree.kernels.sample.triton import rank_scores_pooled_triton

        return rank_scores_pooled_triton(logits, temperatures, streams)
    return rank_scores_pooled_reference(logits, temperatures, streams)


def _check(logits: torch.Tensor, temperatures: torch.Tensor, streams: torch.Tensor) -> None:
    rows = logits.shape[:1]
    if logits.ndim != 2 or temperatures.shape != rows or streams.shape != rows:
        raise ValueError(
            f"logits must be [R, V], temperatures and streams [R], got {list(logits.shape)}, "
            f"{list(temperatures.shape)}, {list(streams.shape)}"
        )
    if temperatures.dtype != torch.float32 or streams.dtype != torch.int64:
        raise ValueError(
            f"temperatures must be float32 and streams int64, got {temperatures.dtype}, {streams.dtype}"
        )
