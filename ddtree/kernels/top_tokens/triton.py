"""The best `num` tokens of each row in five launches, exactly and in one order.

1. Maxima of G interleaved groups of the vocabulary, and parts of the log-sum-exp. 2. The num-th largest group maximum:
so many groups have a token at least that good, so all of the best `num` are, and hardly more tokens are. 3. Collect
those. 4. Where there are more than fit (many equal, or all in few groups), bisect the whole row. 5. Rank the collected
by counting. A key of 64 bits orders by (value falling, id rising) and is unique in its row. The value is the
log-probability, or (score - row maximum) / temperature.

Letters: R rows, V vocabulary, G groups, C room for collected keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LEAST_TEMPERATURE = tl.constexpr(1e-30)
TILE = 4096  # tokens a program collects from
RANKED, RANKED_AGAINST = 64, 32  # keys a program ranks, and against how many at once
# Groups that a program looks after, most tokens of each that it holds at once, and its warps.
GROUP_TILE, GROUP_ROWS, GROUP_WARPS = 128, 64, 8


@triton.jit
def load_scores(scores, row, ids, vocab_size, stride):
    x = tl.load(scores + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def order_of(x):
    """int32 that rises with the float; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def values_of(x, maximum, divisor, log_sum):
    """(x - maximum) / divisor - log_sum, divided as IEEE wants it."""
    scaled = tl.div_rn(x - maximum, tl.zeros_like(x) + divisor)
    return tl.where(x > float("-inf"), scaled - log_sum, float("-inf"))


@triton.jit
def keys_of(values, ids):
    return (order_of(values).to(tl.int64) << 32) + (2147483647 - ids)


@triton.jit
def _groups_kernel(
    scores, temperatures, group_maxima, maxima, sums, vocab_size, stride, num_parts,
    SCALED: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Group g holds the tokens g, g + G, g + 2 G, ...: neighbours, often alike, lie in different groups."""
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    sharpness = 1.0
    if SCALED:
        sharpness = 1.0 / tl.maximum(tl.load(temperatures + row), LEAST_TEMPERATURE)
    best = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, vocab_size, ROWS * GROUPS):
        ids = first + tl.arange(0, ROWS)[:, None] * GROUPS + columns[None, :]
        x = load_scores(scores, row, ids, vocab_size, stride)
        larger = tl.maximum(best, x)
        shift = tl.where(larger > float("-inf"), larger, 0.0)
        total = total * tl.exp((best - shift) * sharpness) + tl.exp((x - shift) * sharpness)
        best = larger
    group_best = tl.max(best, axis=0)
    tl.store(group_maxima + row * GROUPS + columns, group_best)
    maximum = tl.max(group_best, axis=0)
    shift = tl.where(maximum > float("-inf"), maximum, 0.0)
    tl.store(maxima + row * num_parts + part, maximum)
    tl.store(sums + row * num_parts + part, tl.sum(tl.sum(total * tl.exp((best - shift) * sharpness), axis=1), axis=0))


@triton.jit
def _threshold_kernel(
    group_maxima, temperatures, maxima, sums, normalisers, thresholds, numbers, num, num_parts,
    SCALED: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A row's maximum, divisor, log-sum and sum, and the least value to collect."""
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    mask = parts < num_parts
    part_maxima = tl.load(maxima + row * num_parts + parts, mask=mask, other=float("-inf"))
    maximum = tl.max(part_maxima, axis=0)
    shift = tl.where(maximum > float("-inf"), maximum, 0.0)
    part_sums = tl.load(sums + row * num_parts + parts, mask=mask, other=0.0)
    divisor = tl.full([], 1.0, tl.float32)
    if SCALED:
        divisor = tl.maximum(tl.load(temperatures + row), LEAST_TEMPERATURE)
    total = tl.maximum(tl.sum(part_sums * tl.exp((part_maxima - shift) / divisor), axis=0), 1.0)
    log_sum = tl.full([], 0.0, tl.float32)
    if not SCALED:
        # fp64: near 1 the fast fp32 logarithm may be negative, and then a log-probability positive.
        log_sum = tl.log(total.to(tl.float64)).to(tl.float32)
    best = tl.load(group_maxima + row * GROUPS + tl.arange(0, GROUPS))
    order = order_of(best).to(tl.int64)
    low, high = tl.min(order, axis=0), tl.max(order, axis=0) + 1
    count = tl.full([], GROUPS, tl.int32)
    # At least `num` groups reach `low`, fewer reach `high`.
    while (high - low > 1) & (count != num):
        middle = (low + high) >> 1
        reaching = tl.sum((order >= middle).to(tl.int32), axis=0)
        enough = reaching >= num
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        count = tl.where(enough, reaching, count)
    least = tl.min(tl.where(order >= low, best, float("inf")), axis=0)
    least = tl.maximum(values_of(least, shift, divisor, log_sum), -3.0e38)
    tl.store(normalisers + row * 4, shift)
    tl.store(normalisers + row * 4 + 1, divisor)
    tl.store(normalisers + row * 4 + 2, log_sum)
    tl.store(normalisers + row * 4 + 3, total)
    tl.store(thresholds + row, least)
    tl.store(numbers + row, 0)


@triton.jit
def _collect_kernel(
    scores, normalisers, thresholds, numbers, keys, vocab_size, stride, ROOM: tl.constexpr, TILE: tl.constexpr
):
    """Keys of all tokens that reach the threshold, in any order; `numbers` counts also what finds no room."""
    row, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_scores(scores, row, ids, vocab_size, stride)
    values = values_of(
        x, tl.load(normalisers + row * 4), tl.load(normalisers + row * 4 + 1), tl.load(normalisers + row * 4 + 2)
    )
    keep = values >= tl.load(thresholds + row)
    number = tl.sum(keep.to(tl.int32), axis=0)
    if number > 0:
        first = tl.atomic_add(numbers + row, number)
        places = first + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(keys + row * ROOM + places, keys_of(values, ids), mask=keep & (places < ROOM))


@triton.jit
def _bisect_kernel(
    scores, normalisers, thresholds, numbers, keys, vocab_size, stride, num, ROOM: tl.constexpr, TILE: tl.constexpr
):
    """For a row that collected too many: the `num` best by bisecting over its keys. Others do nothing."""
    row = tl.program_id(0)
    if tl.load(numbers + row) > ROOM:
        maximum, divisor = tl.load(normalisers + row * 4), tl.load(normalisers + row * 4 + 1)
        log_sum = tl.load(normalisers + row * 4 + 2)
        low = order_of(tl.load(thresholds + row)).to(tl.int64) << 32
        high = tl.full([], 1 << 32, tl.int64)
        count = tl.full([], 0, tl.int32)
        while (high - low > 1) & (count != num):
            middle = low + ((high - low) >> 1)  # the sum of both may overflow
            count = tl.full([], 0, tl.int32)
            for first in range(0, vocab_size, TILE):
                ids = first + tl.arange(0, TILE)
                x = load_scores(scores, row, ids, vocab_size, stride)
                reach = (ids < vocab_size) & (keys_of(values_of(x, maximum, divisor, log_sum), ids) >= middle)
                count += tl.sum(reach.to(tl.int32), axis=0)
            low, high = tl.where(count >= num, middle, low), tl.where(count >= num, high, middle)
        filled = tl.full([], 0, tl.int32)
        for first in range(0, vocab_size, TILE):
            ids = first + tl.arange(0, TILE)
            x = load_scores(scores, row, ids, vocab_size, stride)
            found = keys_of(values_of(x, maximum, divisor, log_sum), ids)
            reach = (ids < vocab_size) & (found >= low)
            places = filled + tl.cumsum(reach.to(tl.int32), axis=0) - 1
            tl.store(keys + row * ROOM + places, found, mask=reach & (places < ROOM))
            filled += tl.sum(reach.to(tl.int32), axis=0)
        tl.store(numbers + row, tl.minimum(filled, ROOM))


@triton.jit
def _rank_kernel(
    keys, numbers, token_ids, values, num, ROOM: tl.constexpr, RANKED: tl.constexpr, OTHERS: tl.constexpr
):
    """Each key's place is how many are better; places that no key takes get id 0 and -inf."""
    row, part = tl.program_id(0), tl.program_id(1)
    number = tl.load(numbers + row)
    places = part * RANKED + tl.arange(0, RANKED)
    if part * RANKED < number:
        mine = tl.load(keys + row * ROOM + places, mask=places < number, other=0)
        better = tl.zeros([RANKED, OTHERS], tl.int32)
        for first in range(0, number, OTHERS):
            others = first + tl.arange(0, OTHERS)
            other = tl.load(keys + row * ROOM + others, mask=others < number, other=-9223372036854775808)
            better += (other[None, :] > mine[:, None]).to(tl.int32)
        rank = tl.sum(better, axis=1)
        order = (mine >> 32).to(tl.int32)
        bits = order ^ ((order >> 31) & 0x7FFFFFFF)
        wanted = (places < number) & (rank < num)
        tl.store(token_ids + row * num + rank, 2147483647 - (mine & 0xFFFFFFFF), mask=wanted)
        tl.store(values + row * num + rank, bits.to(tl.float32, bitcast=True), mask=wanted)
    empty = (places >= number) & (places < num)
    tl.store(token_ids + row * num + places, tl.zeros([RANKED], tl.int64), mask=empty)
    tl.store(values + row * num + places, tl.full([RANKED], float("-inf"), tl.float32), mask=empty)


def top_tokens_triton(
    scores: torch.Tensor, num: int, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best `num` of each row of `scores` [R, V], best first, ties to the lowest id.

    Returns ids [R, num] int64, values [R, num] float32, and per row the maximum, the divisor, what is taken away, and
    the sum of exp((score - maximum) / divisor), [R, 4] float32. The values are log-probabilities, or with
    `temperatures` [R] float32 the scores less their maximum, divided by the temperature. Where only tokens of -inf or
    NaN are left: id 0 and -inf.
    """
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    (num_rows, vocab_size), device = scores.shape, scores.device
    token_ids = torch.empty(num_rows, num, dtype=torch.int64, device=device)
    values = torch.empty(num_rows, num, dtype=torch.float32, device=device)
    normalisers = torch.empty(num_rows, 4, dtype=torch.float32, device=device)
    if not num_rows:
        return token_ids, values, normalisers
    scaled = temperatures is not None
    groups, room = group_count(num), room_for(num)
    parts, stride = groups // GROUP_TILE, scores.stride(0)
    rows = min(GROUP_ROWS, triton.next_power_of_2(triton.cdiv(vocab_size, groups)))
    group_maxima = torch.empty(num_rows, groups, dtype=torch.float32, device=device)
    maxima, sums = torch.empty(2, num_rows, parts, dtype=torch.float32, device=device)
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    numbers = torch.empty(num_rows, dtype=torch.int32, device=device)
    keys = torch.empty(num_rows, room, dtype=torch.int64, device=device)
    _groups_kernel[(num_rows, parts)](
        scores, temperatures, group_maxima, maxima, sums, vocab_size, stride, parts,
        SCALED=scaled, GROUPS=groups, COLUMNS=GROUP_TILE, ROWS=rows, num_warps=GROUP_WARPS,
    )  # fmt: skip
    _threshold_kernel[(num_rows,)](
        group_maxima, temperatures, maxima, sums, normalisers, thresholds, numbers, num, parts,
        SCALED=scaled, GROUPS=groups, PARTS=triton.next_power_of_2(parts), num_warps=8 if groups <= 2048 else 16,
    )  # fmt: skip
    found = (scores, normalisers, thresholds, numbers, keys, vocab_size, stride)
    _collect_kernel[(num_rows, triton.cdiv(vocab_size, TILE))](*found, ROOM=room, TILE=TILE, num_warps=8)
    _bisect_kernel[(num_rows,)](*found, num, ROOM=room, TILE=TILE, num_warps=16)
    _rank_kernel[(num_rows, room // RANKED)](
        keys, numbers, token_ids, values, num, ROOM=room, RANKED=RANKED, OTHERS=RANKED_AGAINST, num_warps=4
    )
    return token_ids, values, normalisers


def group_count(num: int) -> int:
    """G: eight groups for each token wanted, so that few tokens beside the best reach the threshold."""
    return max(2048, triton.next_power_of_2(8 * num))


def room_for(num: int) -> int:
    """C: a multiple of RANKED."""
    return max(1024, triton.next_power_of_2(4 * num))
