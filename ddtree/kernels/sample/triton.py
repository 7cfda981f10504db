"""Drawing in Triton: raw maxima per tile, approximate perturbed maxima per tile, exact noise only where it can matter.

Exact noise takes two fp64 logarithms a token, which a card without fp64 units pays for. So every token first gets fp32
noise, good to APPROXIMATE, and only tiles within MARGIN of a row's best are computed again in fp64: almost always one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.top_tokens.triton import keys_of, load_scores

TILE, WARPS = 4096, 8  # tokens and warps of a program
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
LEAST_TEMPERATURE = tl.constexpr(1e-30)
MARGIN = tl.constexpr(1e-3)  # the fp32 noise is 50 times closer
DONE = tl.constexpr((1 << 63) - 1)  # the cut of a row whose token is drawn already
RANK_LOGITS, RANK_NOISE = tl.constexpr(0.8), tl.constexpr(0.67)


@triton.jit
def _mix(state):
    """SplitMix64's finaliser of uint64 states."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _bits(stream, ids):
    """The 52 random bits of each token id, int64."""
    counters = (ids + 1).to(tl.uint64) * GOLDEN
    return (_mix(counters + stream) >> 12).to(tl.int64)


@triton.jit
def gumbel_of(stream, ids):
    """The exact noise, float32."""
    complements = _bits(stream, ids).to(tl.float64) * -(2.0**-52) + (1 - 2.0**-53)
    return (-tl.log(-tl.log(complements))).to(tl.float32)


@triton.jit
def _gumbel_approximate(bits):
    """The same in fp32: from u where that is small, from 1 - u elsewhere, so that neither loses its digits."""
    uniform = bits.to(tl.float32) * (2.0**-52) + 2.0**-53
    complement = (4503599627370495 - bits).to(tl.float32) * (2.0**-52) + 2.0**-53
    series = uniform * (1 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    return -tl.log(tl.where(uniform < 0.03125, series, -tl.log(complement)))


@triton.jit
def _finite(maximum):
    """A row's maximum; 0 where all of it is -inf (padding), to be taken away without a NaN."""
    return tl.where(maximum > float("-inf"), maximum, 0.0)


@triton.jit
def _row_maximum(maxima, row, num_tiles, TILES: tl.constexpr):
    tiles = tl.arange(0, TILES)
    found = tl.load(maxima + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    return _finite(tl.max(found, axis=0))


@triton.jit
def _scaled(x, maximum, temperature):
    return tl.div_rn(x - maximum, tl.zeros_like(x) + tl.maximum(temperature, LEAST_TEMPERATURE))


@triton.jit
def _streams_kernel(keys, positions, streams, num_rows, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    key = tl.load(keys + rows, mask=mask, other=0).to(tl.uint64)
    position = tl.load(positions + rows, mask=mask, other=0).to(tl.int64).to(tl.uint64)
    tl.store(streams + rows, _mix(key + _mix(position + GOLDEN) + GOLDEN).to(tl.int64), mask=mask)


@triton.jit
def _maxima_kernel(logits, maxima, places, vocab_size, stride, num_tiles, TILE: tl.constexpr):
    """Each tile's largest logit and the lowest id that has it."""
    row, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_scores(logits, row, ids, vocab_size, stride)
    best = tl.max(x, axis=0)
    tl.store(maxima + row * num_tiles + tile, best)
    tl.store(places + row * num_tiles + tile, tl.min(tl.where(x == best, ids, vocab_size - 1), axis=0))


@triton.jit
def _perturbed_kernel(
    logits, maxima, temperatures, streams, cuts, perturbed, vocab_size, stride, num_tiles,
    FILTERED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Each tile's largest perturbed score, with approximate noise; greedy rows and drawn ones do nothing."""
    row, tile = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    wanted = temperature > 0
    if FILTERED:
        cut = tl.load(cuts + row)
        wanted = wanted & (cut != DONE)
    if wanted:
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_scores(logits, row, ids, vocab_size, stride)
        scaled = _scaled(x, _row_maximum(maxima, row, num_tiles, TILES), temperature)
        keep = x > float("-inf")
        if FILTERED:
            keep = keep & (keys_of(scaled, ids) >= cut)
        noise = _gumbel_approximate(_bits(tl.load(streams + row).to(tl.uint64), ids))
        tl.store(perturbed + row * num_tiles + tile, tl.max(tl.where(keep, scaled + noise, float("-inf")), axis=0))


@triton.jit
def _choose_kernel(
    logits, maxima, places, perturbed, temperatures, streams, cuts, chosen, vocab_size, stride, num_tiles,
    FILTERED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One row's token: the first tile's place among equals, or the exact draw from the tiles that may hold it."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    tiles = tl.arange(0, TILES)
    mask = tiles < num_tiles
    if FILTERED:
        cut = tl.load(cuts + row)
        mask = mask & (cut != DONE)
    tile_maxima = tl.load(maxima + row * num_tiles + tiles, mask=mask, other=float("-inf"))
    maximum = tl.max(tile_maxima, axis=0)
    token = tl.zeros([], tl.int32)
    if temperature > 0:
        approximate = tl.load(perturbed + row * num_tiles + tiles, mask=mask, other=float("-inf"))
        open_tiles = mask & (approximate >= tl.max(approximate, axis=0) - MARGIN)
        stream = tl.load(streams + row).to(tl.uint64)
        best = tl.zeros([], tl.float32) + float("-inf")
        tile = tl.min(tl.where(open_tiles, tiles, TILES), axis=0)
        while tile < TILES:
            ids = tile * TILE + tl.arange(0, TILE)
            x = load_scores(logits, row, ids, vocab_size, stride)
            scaled = _scaled(x, _finite(maximum), temperature)
            keep = x > float("-inf")
            if FILTERED:
                keep = keep & (keys_of(scaled, ids) >= cut)
            scores = tl.where(keep, scaled + gumbel_of(stream, ids), float("-inf"))
            tile_best = tl.max(scores, axis=0)
            place = tl.min(tl.where(scores == tile_best, ids, vocab_size - 1), axis=0)
            # Tiles come in rising order, so an equal score never wins.
            token = tl.where(tile_best > best, place, token)
            best = tl.maximum(best, tile_best)
            tile = tl.min(tl.where(open_tiles & (tiles > tile), tiles, TILES), axis=0)
    else:
        tile_places = tl.load(places + row * num_tiles + tiles, mask=mask, other=0)
        token = tl.min(tl.where(mask & (tile_maxima == maximum), tile_places, vocab_size - 1), axis=0)
    if FILTERED:
        tl.store(chosen + row, token.to(tl.int64), mask=cut != DONE)
    else:
        tl.store(chosen + row, token.to(tl.int64))


@triton.jit
def _rank_kernel(
    logits, maxima, temperatures, streams, scores, vocab_size, stride, num_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_scores(logits, row, ids, vocab_size, stride)
    if temperature > 0:
        scaled = _scaled(x, _row_maximum(maxima, row, num_tiles, TILES), temperature)
        noise = _gumbel_approximate(_bits(tl.load(streams + row).to(tl.uint64), ids))
        noisy = (scaled * (RANK_LOGITS / RANK_NOISE) + noise) * RANK_NOISE
        x = tl.where(x > float("-inf"), noisy, float("-inf"))
    tl.store(scores + row.to(tl.int64) * vocab_size + ids, x, mask=ids < vocab_size)


def streams_pooled_triton(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    streams = torch.empty_like(keys, memory_format=torch.contiguous_format)
    if len(keys):
        rows = 128
        grid = (triton.cdiv(len(keys), rows),)
        _streams_kernel[grid](keys.contiguous(), positions.contiguous(), streams, len(keys), ROWS=rows)
    return streams


def choose_pooled_triton(logits: torch.Tensor, temperatures: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        draw_pooled(logits, temperatures, streams, chosen)
    return chosen


def draw_pooled(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    streams: torch.Tensor,
    chosen: torch.Tensor,
    cuts: torch.Tensor | None = None,
) -> None:
    """Fill `chosen` [R]; with `cuts` [R] int64 only from tokens whose key reaches the row's, and none where DONE."""
    logits, tiles, maxima, places = _maxima(logits)
    num_rows, vocab_size = logits.shape
    perturbed = torch.empty_like(maxima)
    shape = (vocab_size, logits.stride(0), tiles)
    sizes = {"FILTERED": cuts is not None, "TILE": TILE, "TILES": triton.next_power_of_2(tiles)}
    _perturbed_kernel[(num_rows, tiles)](
        logits, maxima, temperatures, streams, cuts, perturbed, *shape, **sizes, num_warps=WARPS
    )
    _choose_kernel[(num_rows,)](
        logits, maxima, places, perturbed, temperatures, streams, cuts, chosen, *shape, **sizes, num_warps=WARPS
    )


def rank_scores_pooled_triton(
    logits: torch.Tensor, temperatures: torch.Tensor, streams: torch.Tensor
) -> torch.Tensor:
    scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        logits, tiles, maxima, _ = _maxima(logits)
        grid, sizes = (len(logits), tiles), {"TILE": TILE, "TILES": triton.next_power_of_2(tiles)}
        shape = (logits.shape[1], logits.stride(0), tiles)
        _rank_kernel[grid](logits, maxima, temperatures, streams, scores, *shape, **sizes, num_warps=WARPS)
    return scores


def _maxima(logits: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """(logits with unit stride along V, tiles of a row, their maxima [R, tiles], the lowest ids of these)."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, TILE)
    maxima = torch.empty(num_rows, tiles, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, tiles, dtype=torch.int32, device=logits.device)
    shape = (vocab_size, logits.stride(0), tiles)
    _maxima_kernel[(num_rows, tiles)](logits, maxima, places, *shape, TILE=TILE, num_warps=WARPS)
    return logits, tiles, maxima, places
