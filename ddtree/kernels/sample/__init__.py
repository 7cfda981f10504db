"""One token per row from logits, greedy or with keyed Gumbel noise, for requests of any temperatures at once.

The noise is that of ddtree.sampling.noise: SplitMix64, one stream per (request, absolute position), the token id as its
counter, logarithms in fp64. So a draw is the same on the host and on the device, alone or in a batch, plain or in a
tree. A CUDA tensor goes to the Triton kernels, any other to the twin.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from ddtree.kernels.sample.reference import (
    choose_filtered_pooled_reference,
    choose_pooled_reference,
    rank_scores_pooled_reference,
    streams_pooled_reference,
)

__all__ = [
    "choose_filtered_pooled",
    "choose_filtered_pooled_reference",
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

        return choose_pooled_triton(logits, temperatures.contiguous(), streams.contiguous())
    return choose_pooled_reference(logits, temperatures, streams)


def choose_filtered_pooled(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    streams: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """`choose_pooled` from what top-k, top-p and min-p keep, in that order, as ddtree.sampling.choose.choose has it.

    `top_ks` [R] int32, 0 off; `top_ps` [R] float64, 1 off; `min_ps` [R] float64, 0 off: float64, so that 0.95 is the
    request's 0.95. Rows differ as they like, greedy and unfiltered ones among them. Nothing waits for the device. Rows
    that keep more than the 1,024 best tokens cost passes over the whole row.
    """
    _check(logits, temperatures, streams)
    for name, tensor, dtype in (
        ("top_ks", top_ks, torch.int32),
        ("top_ps", top_ps, torch.float64),
        ("min_ps", min_ps, torch.float64),
    ):
        if tensor.shape != temperatures.shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} must be {list(temperatures.shape)} {dtype}, got {list(tensor.shape)} {tensor.dtype}"
            )
    if logits.is_cuda:
        from ddtree.kernels.sample.triton_filtered import choose_filtered_pooled_triton as choose
    else:
        choose = choose_filtered_pooled_reference
    return choose(logits, *(column.contiguous() for column in (temperatures, streams, top_ks, top_ps, min_ps)))


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

        return rank_scores_pooled_triton(logits, temperatures.contiguous(), streams.contiguous())
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
