"""The obvious twins: SplitMix64 in wrapping int64, Gumbel noise in fp64, one whole row of scores at a time.

The noise is that of ddtree.sampling.noise, bit for bit; this room may import no other, so it is written here again.
"""

from __future__ import annotations

import math

import torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's increment, as int64
FINALISER = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
LEAST_TEMPERATURE = 1e-30  # keeps (logits - max) / temperature clear of 0 / 0
RANK_LOGITS, RANK_NOISE = 0.8, 0.67  # how far the drafter's ranking trusts its logits and the noise


def mix(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser of int64 states."""
    for shift, factor in FINALISER:
        # torch shifts int64 arithmetically; the mask makes it logical.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return state


def streams_pooled_reference(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Same arguments and result as `streams_pooled`."""
    return mix(keys + mix(positions.long() + GOLDEN) + GOLDEN)


def gumbel(streams: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] float32 Gumbel noise of `streams` [R] int64."""
    counters = torch.arange(1, vocab_size + 1, device=streams.device) * GOLDEN
    bits = (mix(counters + streams[:, None]) >> 12) & ((1 << 52) - 1)
    complements = bits.double() * -(2.0**-52) + (1 - 2.0**-53)
    return -torch.log(-torch.log(complements)).float()


def scaled(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """[R, V] float32: (logits - row maximum) / temperature."""
    logits = logits.float()
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.clamp(min=LEAST_TEMPERATURE)[:, None]


def choose_pooled_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, streams: torch.Tensor
) -> torch.Tensor:
    """Same arguments and result as `choose_pooled`."""
    drawn = (scaled(logits, temperatures) + gumbel(streams, logits.shape[-1])).argmax(dim=-1)
    return torch.where(temperatures > 0, drawn, logits.argmax(dim=-1))


def rank_scores_pooled_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, streams: torch.Tensor
) -> torch.Tensor:
    """Same arguments and result as `rank_scores_pooled`."""
    noise = gumbel(streams, logits.shape[-1])
    noisy = (scaled(logits, temperatures) * (RANK_LOGITS / RANK_NOISE) + noise) * RANK_NOISE
    return torch.where(temperatures[:, None] > 0, noisy, logits.float())


def choose_filtered_pooled_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    streams: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Same arguments and result as `choose_filtered_pooled`: rows sorted, their filters counted out one by one."""
    vocab_size = logits.shape[-1]
    chosen = logits.argmax(dim=-1)
    values, noise = scaled(logits, temperatures), gumbel(streams, vocab_size)
    filters = zip(temperatures.tolist(), top_ks.tolist(), top_ps.tolist(), min_ps.tolist(), strict=True)
    for row, (temperature, top_k, top_p, min_p) in enumerate(filters):
        if temperature <= 0:
            continue
        best = values[row].sort(descending=True, stable=True)
        kept = top_k if 0 < top_k < vocab_size else vocab_size
        if top_p < 1:
            weights = best.values[:kept].exp()
            mass = weights.double().cumsum(dim=0) / weights.sum(dtype=torch.float64)
            # A token stays while the mass before it falls short.
            kept = int((mass[:-1] < top_p).sum()) + 1
        if min_p > 0:
            kept = min(kept, int((best.values >= math.log(min_p)).sum()))
        drawn = torch.full_like(values[row], -torch.inf)
        places = best.indices[:kept]
        drawn[places] = values[row, places] + noise[row, places]
        chosen[row] = drawn.argmax()
    return chosen
