"""Drawing under top-k, top-p and min-p in Triton, without waiting for the host.

Each filter keeps some number of the best tokens, so all of them together keep the first n in the order of
`top_tokens`, n the least of the three. Almost always n lies within the LISTED best: then these are weighed, cut and
drawn from by one program a row. For the other rows (flat ones, or rows without a filter) the cut is a key, found by
bisecting the whole row, and the kernels of `choose_pooled` draw from what reaches it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.sample.triton import DONE, draw_pooled, gumbel_of
from ddtree.kernels.top_tokens.triton import keys_of, load_scores, order_of, top_tokens_triton, values_of

LISTED = 1024
TILE = 4096
EVERYTHING = tl.constexpr(-(1 << 63))  # the key that all tokens reach


@triton.jit
def _listed_kernel(
    token_ids, values, normalisers, temperatures, streams, top_ks, top_ps, min_ps, chosen, cuts, vocab_size,
    LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw where the list holds all that the filters keep; `cuts` says DONE there, else EVERYTHING."""
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    inside = places < LISTED
    ids = tl.load(token_ids + row * LISTED + places, mask=inside, other=0)
    value = tl.load(values + row * LISTED + places, mask=inside, other=float("-inf"))
    possible = value > float("-inf")
    number = tl.sum(possible.to(tl.int32), axis=0)
    # A list with room left holds every token that can be drawn.
    whole = (number < LISTED) | (vocab_size <= LISTED)
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    limited = (top_k > 0) & (top_k < vocab_size)
    kept = tl.where(limited, top_k, vocab_size)
    weights = tl.where(possible, tl.exp(tl.where(possible, value, 0.0).to(tl.float64)), 0.0)
    survivors = tl.sum(tl.where(places < kept, weights, 0.0), axis=0)
    total = tl.where(limited | whole, survivors, tl.load(normalisers + row * 4 + 3).to(tl.float64))
    weighable = whole | (kept == vocab_size) | (kept <= LISTED)
    short = tl.cumsum(weights, axis=0) / total < top_p
    # A token stays while the mass before it falls short.
    nucleus = tl.sum((short & possible & (places < kept)).to(tl.int32), axis=0) + 1
    kept = tl.where(top_p < 1, tl.minimum(kept, nucleus), kept)
    if min_p > 0:
        likely = tl.sum((possible & (value >= tl.log(min_p).to(tl.float32))).to(tl.int32), axis=0)
        kept = tl.where((likely < number) | whole, tl.minimum(kept, likely), kept)
    kept = tl.where(temperature > 0, kept, 1)
    done = ((kept <= number) & (weighable | (top_p >= 1))) | whole | (temperature <= 0)
    tl.store(cuts + row, tl.where(done, DONE, EVERYTHING))
    if done:
        drawable = possible & (places < kept)
        stream = tl.load(streams + row).to(tl.uint64)
        scores = tl.where(drawable, value + gumbel_of(stream, ids), float("-inf"))
        best = tl.max(scores, axis=0)
        token = tl.min(tl.where(drawable & (scores == best), ids, vocab_size), axis=0)
        tl.store(chosen + row, tl.where(number > 0, token, 0).to(tl.int64))


@triton.jit
def _reaching(logits, row, maximum, divisor, key, vocab_size, stride, COUNTED: tl.constexpr, TILE: tl.constexpr):
    """fp64: how many tokens reach the key, or the sum of their weights."""
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        value = values_of(load_scores(logits, row, ids, vocab_size, stride), maximum, divisor, 0.0)
        reach = (value > float("-inf")) & (keys_of(value, ids) >= key)
        if COUNTED:
            total += tl.sum(reach.to(tl.int32), axis=0).to(tl.float64)
        else:
            total += tl.sum(tl.where(reach, tl.exp(tl.where(reach, value, 0.0)), 0.0), axis=0).to(tl.float64)
    return total


@triton.jit
def _largest_key(logits, row, maximum, divisor, low, goal, vocab_size, stride,
                 COUNTED: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The largest key that `goal` (tokens, or weight) still reaches; at least `low`, which it reaches."""
    high = tl.full([], 1 << 32, tl.int64)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = _reaching(logits, row, maximum, divisor, middle, vocab_size, stride, COUNTED, TILE) >= goal
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _cuts_kernel(logits, normalisers, top_ks, top_ps, min_ps, cuts, vocab_size, stride, TILE: tl.constexpr):
    """The least key that the filters keep, for rows that are not done."""
    row = tl.program_id(0)
    if tl.load(cuts + row) != DONE:
        maximum, divisor = tl.load(normalisers + row * 4), tl.load(normalisers + row * 4 + 1)
        top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        # The lowest key of a finite value.
        cut = order_of(tl.full([], -3.0e38, tl.float32)).to(tl.int64) << 32
        if (top_k > 0) & (top_k < vocab_size):
            goal = top_k.to(tl.float64)
            cut = _largest_key(logits, row, maximum, divisor, cut, goal, vocab_size, stride, True, TILE)
        if top_p < 1:
            goal = top_p * _reaching(logits, row, maximum, divisor, cut, vocab_size, stride, False, TILE)
            cut = _largest_key(logits, row, maximum, divisor, cut, goal, vocab_size, stride, False, TILE)
        if min_p > 0:
            cut = tl.maximum(cut, order_of(tl.log(min_p).to(tl.float32)).to(tl.int64) << 32)
        tl.store(cuts + row, cut)


def choose_filtered_pooled_triton(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    streams: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """As `choose_filtered_pooled`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (num_rows, vocab_size), device = logits.shape, logits.device
    chosen = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return chosen
    listed = min(LISTED, vocab_size)
    cuts = torch.empty(num_rows, dtype=torch.int64, device=device)
    token_ids, values, normalisers = top_tokens_triton(logits, listed, temperatures)
    filters = (top_ks, top_ps, min_ps)
    _listed_kernel[(num_rows,)](
        token_ids, values, normalisers, temperatures, streams, *filters, chosen, cuts, vocab_size,
        LISTED=listed, BLOCK=triton.next_power_of_2(listed), num_warps=4,
    )  # fmt: skip
    _cuts_kernel[(num_rows,)](
        logits, normalisers, *filters, cuts, vocab_size, logits.stride(0), TILE=TILE, num_warps=16
    )
    draw_pooled(logits, temperatures, streams, chosen, cuts)
    return chosen
