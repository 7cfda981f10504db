"""A first ceiling for the best-first tree in Triton, before any node is known: levels then hold little but the tree's own nodes.

The best child of each depth down to some depth, then any of its `budget` best: the dearest of those nodes bounds the
tree's. Up to there costs are cut into bins, each step's surplus over the best child rounded up; how many nodes of a level
fall into a bin is how many of its parents' fall lower by the step's: a convolution a level. Rounded up, and counted no higher
than the budget, `budget` nodes within a bin are no fewer in truth.
"""

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(128)  # the last one holds what is too dear
UNITS_PER_NAT = tl.constexpr(1099511627776.0)
NONE = tl.constexpr((1 << 62) - 1)


@triton.jit
def first_ceiling(log_probs, scratch, budget, limit, width, RANKS: tl.constexpr, LEVELS: tl.constexpr):
    """A cost within which there are at least `budget` nodes, in units; NONE where the scores of no depth tell.

    `log_probs` [limit, width], best first; `scratch` 2 * BINS int32; RANKS, a power of two, is at least the budget.
    """
    bound = _one_depth_bound(log_probs, budget, limit, width, LEVELS)
    ceiling = tl.full([], NONE, tl.int64)
    if bound < 1e30:  # not infinite
        step = tl.maximum(bound * 1.00001, 1e-6) / (BINS - 2)
        cut = _first_full_bin(log_probs, scratch, 1.0 / step, budget, limit, width, RANKS)
        # One bin more, for what fp32 may have rounded down.
        nats = tl.minimum((cut + 1).to(tl.float32) * step, bound * 1.00001 + 1e-6)
        ceiling = (nats.to(tl.float64) * UNITS_PER_NAT).to(tl.int64) + 1
    return ceiling


@triton.jit
def _one_depth_bound(log_probs, budget, limit, width, LEVELS: tl.constexpr):
    """In nats: the least, over depths, of the best path to the depth above and the depth's `budget`-th best; or infinity."""
    DEPTHS: tl.constexpr = triton.next_power_of_2(LEVELS)
    depth = tl.arange(0, DEPTHS)
    counts = (depth < limit) & (budget > 0) & (budget <= width)
    best = tl.load(log_probs + depth * width, mask=counts, other=float("-inf"))
    last = tl.load(log_probs + depth * width + budget - 1, mask=counts, other=float("-inf"))
    excluded = ((best > float("-inf")) == 0).to(tl.int32)
    usable = (tl.cumsum(excluded, axis=0) == 0) & (last > float("-inf"))
    cost = tl.where(excluded != 0, 0.0, tl.minimum(-best, 131072.0))
    path = tl.cumsum(cost, axis=0) - cost
    return tl.min(tl.where(usable, path + tl.minimum(-last, 131072.0), float("inf")), axis=0)


@triton.jit
def _first_full_bin(log_probs, scratch, bins_per_nat, budget, limit, width, RANKS: tl.constexpr):
    """The first bin up to which `budget` nodes lie; BINS where they do not."""
    bins, ranks = tl.arange(0, BINS), tl.arange(0, RANKS)
    total = tl.zeros([BINS], tl.int32)
    path = tl.full([], 0.0, tl.float32)
    shift, depth = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    tl.store(scratch + bins, (bins == 0).to(tl.int32))
    tl.debug_barrier()
    while (depth < limit) & (shift < BINS):
        best = tl.load(log_probs + depth * width)
        log_prob = tl.load(log_probs + depth * width + ranks, mask=ranks < width, other=float("-inf"))
        surplus = _bin_of(best - log_prob, bins_per_nat)
        surplus = tl.where(log_prob > float("-inf"), surplus, BINS - 1)
        steps = tl.where(bins < BINS - 1, tl.minimum(tl.histogram(surplus, BINS), budget), 0)
        tl.store(scratch + BINS + bins, steps)
        tl.debug_barrier()
        lower = bins[:, None] - bins[None, :]
        above = tl.load(scratch + bins)[None, :]
        nodes = tl.sum(above * tl.load(scratch + BINS + lower, mask=lower >= 0, other=0), axis=1)
        nodes = tl.minimum(nodes, budget)
        tl.debug_barrier()
        tl.store(scratch + bins, nodes)
        tl.debug_barrier()
        path -= best
        shift = tl.where(best > float("-inf"), tl.minimum(_bin_of(path, bins_per_nat), BINS), BINS)
        total += tl.load(scratch + bins - shift, mask=bins >= shift, other=0)
        depth += 1
    full = (tl.cumsum(total, axis=0) >= budget) & (bins < BINS - 1)
    return tl.min(tl.where(full, bins, BINS), axis=0)


@triton.jit
def _bin_of(nats, bins_per_nat):
    """0 for 0, else rounded up, or one more; at most BINS - 1."""
    place = tl.minimum(nats * bins_per_nat, BINS - 2).to(tl.int32) + 1
    return tl.where(nats > 0, tl.minimum(place, BINS - 1), 0)
