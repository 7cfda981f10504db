"""Conditioned scores in Triton, two launches: the parents' hidden rows, then their scores of the candidates.

A row is a parent (sequence, depth, candidate). One launch for both would take every program through the whole of the mixing
weight; two halves the way. Products are in the weights' dtype with fp32 sums, all else is fp32.

Letters as in the package's __init__; R = B * D * M rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.conditioning.weights import LEAST_LOG_PROB, LEAST_REST, AdapterWeights

COLUMNS = 64  # of the hidden rows, a program
PARENTS = 16  # that a program scores
# Bytes of a weight -> width multiplied at once, ranks multiplied at once, stages.
TILES = {2: (64, 128, 3), 4: (32, 32, 2)}


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def _mix_kernel(
    places, root_tokens, token_ids, parent_table, mix_weight, mix_bias, hidden, num_rows, depths, width,
    stride_table, stride_weight,
    H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """silu(x), mixed, plus itself, for a few columns of a few rows; x = the parent's row + its place."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < num_rows
    place = row // width
    below_root = place % depths == 0
    # The parents of a depth are the candidates of the one before.
    token = tl.load(token_ids + row - width, mask=there & ~below_root, other=0)
    token = tl.where(below_root, tl.load(root_tokens + place // depths, mask=there, other=0), token)
    parent_rows = parent_table + token[:, None] * stride_table
    place_rows = places + place.to(tl.int64)[:, None] * H
    weight_rows = mix_weight + column[None, :] * stride_weight
    step = tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, H, STEP, num_stages=STAGES):
        k = first + step
        x = tl.load(parent_rows + k[None, :], mask=there[:, None], other=0.0).to(tl.float32)
        x += tl.load(place_rows + k[None, :], mask=there[:, None], other=0.0).to(tl.float32)
        weight = tl.load(weight_rows + k[:, None])
        total = tl.dot(_silu(x).to(weight.dtype), weight, total, input_precision="ieee")
    x = tl.load(parent_rows + column[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    x += tl.load(place_rows + column[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    total += tl.load(mix_bias + column).to(tl.float32)[None, :]
    mixed = _silu(x) + _silu(total)
    out = hidden + row.to(tl.int64)[:, None] * H + column[None, :]
    tl.store(out, mixed.to(hidden.dtype.element_ty), mask=there[:, None])


@triton.jit
def _score_kernel(
    hidden, token_ids, log_probs, ranking, strengths, candidate_table, out_weight, out_bias, scores, depths, width,
    stride_table, stride_weight, least_log_prob, least_rest,
    H: tl.constexpr, E: tl.constexpr, PARENTS: tl.constexpr, CANDIDATES: tl.constexpr,
    STEP: tl.constexpr, RANKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a few parents of one depth say of that depth's candidates."""
    place = tl.program_id(0).to(tl.int64)
    parent = tl.program_id(1) * PARENTS + tl.arange(0, PARENTS)
    candidate = tl.arange(0, CANDIDATES)
    there, listed = parent < width, candidate < width
    token = tl.load(token_ids + place * width + candidate, mask=listed, other=0)
    own = tl.load(log_probs + place * width + candidate, mask=listed, other=0.0)
    ranked = tl.load(ranking + place * width + candidate, mask=listed, other=float("-inf"))
    strength = tl.load(strengths + place // depths)
    hidden_rows = hidden + (place * width + parent)[:, None] * H
    candidate_rows = candidate_table + token[None, :] * stride_table
    step, ranks = tl.arange(0, STEP), tl.arange(0, RANKS)
    matches = tl.zeros([PARENTS, CANDIDATES], tl.float32)
    for first_rank in range(0, E, RANKS):
        rank = first_rank + ranks
        # Tables of any rank: what is beyond is zero on both sides of the product.
        known = rank < E
        table = tl.load(candidate_rows + rank[:, None], mask=known[:, None] & listed[None, :], other=0.0)
        weight_rows = out_weight + rank[None, :] * stride_weight
        query = tl.zeros([PARENTS, RANKS], tl.float32)
        for first in tl.range(0, H, STEP, num_stages=STAGES):
            k = first + step
            rows = tl.load(hidden_rows + k[None, :], mask=there[:, None], other=0.0)
            weight = tl.load(weight_rows + k[:, None], mask=known[None, :], other=0.0)
            query = tl.dot(rows, weight, query, input_precision="ieee")
        query += tl.load(out_bias + rank, mask=known, other=0.0).to(tl.float32)[None, :]
        matches = tl.dot(query.to(table.dtype), table, matches, input_precision="ieee")
    # The drafter's weight and elsewhere: two rows more.
    last = out_weight + E * stride_weight
    own_weight, elsewhere = tl.zeros([PARENTS, STEP], tl.float32), tl.zeros([PARENTS, STEP], tl.float32)
    for first in range(0, H, STEP):
        k = first + step
        rows = tl.load(hidden_rows + k[None, :], mask=there[:, None], other=0.0).to(tl.float32)
        own_weight += rows * tl.load(last + k).to(tl.float32)[None, :]
        elsewhere += rows * tl.load(last + stride_weight + k).to(tl.float32)[None, :]
    own_weight = tl.sum(own_weight, axis=1) + tl.load(out_bias + E).to(tl.float32)
    elsewhere = tl.sum(elsewhere, axis=1) + tl.load(out_bias + E + 1).to(tl.float32)
    corrections = matches + own_weight[:, None] * tl.maximum(own, least_log_prob)[None, :]
    score = ranked[None, :] + strength * corrections
    known_share = tl.minimum(tl.sum(tl.exp(ranked), axis=0), 1.0 - least_rest)
    rest = tl.log(1.0 - known_share) + strength * elsewhere
    # What is -inf among the candidates stays it: the rest is finite.
    most = tl.maximum(tl.max(score, axis=1), rest)
    total = tl.sum(tl.exp(score - most[:, None]), axis=1) + tl.exp(rest - most)
    score = tl.minimum(score - (most + tl.log(total))[:, None], 0.0)
    out = scores + ((place * width + parent) * width)[:, None] + candidate[None, :]
    tl.store(out, score, mask=there[:, None] & listed[None, :])


def transitions_pooled_triton(
    places: torch.Tensor,
    root_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    ranking: torch.Tensor,
    strengths: torch.Tensor,
    weights: AdapterWeights,
) -> torch.Tensor:
    """Same arguments and result as `transitions_pooled`. H is a multiple of 64, M at most 64."""
    num_sequences, depths, width = token_ids.shape
    parent_table, candidate_table, mix_weight, mix_bias, out_weight, out_bias = weights
    size, rank = parent_table.shape[1], candidate_table.shape[1]
    num_rows = token_ids.numel()
    hidden = torch.empty(num_rows, size, dtype=parent_table.dtype, device=places.device)
    scores = torch.empty(num_sequences, depths, width, width, dtype=torch.float32, device=places.device)
    step, ranks, stages = TILES[parent_table.element_size()]
    rows = max(16, min(64, triton.next_power_of_2(num_rows)))
    _mix_kernel[(triton.cdiv(num_rows, rows), size // COLUMNS)](
        places, root_tokens, token_ids, parent_table, mix_weight, mix_bias, hidden, num_rows, depths, width,
        parent_table.stride(0), mix_weight.stride(0),
        H=size, ROWS=rows, COLUMNS=COLUMNS, STEP=step, STAGES=stages, num_warps=4,
    )  # fmt: skip
    _score_kernel[(num_sequences * depths, triton.cdiv(width, PARENTS))](
        hidden, token_ids, log_probs, ranking, strengths, candidate_table, out_weight, out_bias, scores, depths, width,
        candidate_table.stride(0), out_weight.stride(0), LEAST_LOG_PROB, LEAST_REST,
        H=size, E=rank, PARENTS=PARENTS, CANDIDATES=max(16, triton.next_power_of_2(width)),
        STEP=step, RANKS=ranks, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return scores
