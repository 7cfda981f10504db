"""Conditioned scores in Triton, two launches: the parents' hidden rows, then their scores of the candidates. Where there are
two ancestors count the grandparents' rows lie behind the parents', both kinds stay sums, and a third launch normalises every pair.

A row is a parent (sequence, depth, candidate). One launch for both would take every program through the whole of the mixing
weight; two halves the way. Products are in the weights' dtype with fp32 sums, all else is fp32.

Letters as in the package's __init__; R = B * D * M rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.kernels.conditioning.weights import LEAST_LOG_PROB, LEAST_REST, AdapterWeights, PathScores

COLUMNS = 64  # of the hidden rows, a program
PARENTS = 16  # that a program scores
GRANDPARENTS = 8  # grandparents that a program pairs with every parent
# Bytes of a weight -> width multiplied at once, ranks multiplied at once, stages.
TILES = {2: (64, 128, 3), 4: (32, 32, 2)}


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def _mix_kernel(
    places, root_tokens, token_ids, parent_tables, mix_weights, mix_biases, hidden, num_rows, depths, width, vocab_size,
    H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """silu(x), mixed, plus itself, for a few columns of a few rows; x = the parent's row + its place."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ancestor = tl.program_id(2)
    there = row < num_rows
    place = row // width
    # The parents of a depth are the candidates of the one before, their parents those before these; above is the root.
    is_root = place % depths <= ancestor
    token = tl.load(token_ids + row - (ancestor + 1) * width, mask=there & ~is_root, other=0)
    token = tl.where(is_root, tl.load(root_tokens + place // depths, mask=there, other=0), token)
    parent_rows = parent_tables + (token + ancestor.to(tl.int64) * vocab_size)[:, None] * H
    place_rows = places + (place + ancestor * (num_rows // width)).to(tl.int64)[:, None] * H
    weight_rows = mix_weights + ancestor * H * H + column[None, :] * H
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
    total += tl.load(mix_biases + ancestor * H + column).to(tl.float32)[None, :]
    mixed = _silu(x) + _silu(total)
    out = hidden + (row + ancestor * num_rows).to(tl.int64)[:, None] * H + column[None, :]
    tl.store(out, mixed.to(hidden.dtype.element_ty), mask=there[:, None])


@triton.jit
def _score_kernel(
    hidden, token_ids, log_probs, ranking, strengths, candidate_table, out_weights, out_biases, scores, rests, depths, width,
    least_log_prob, least_rest,
    H: tl.constexpr, E: tl.constexpr, SUMS: tl.constexpr, PARENTS: tl.constexpr, CANDIDATES: tl.constexpr,
    STEP: tl.constexpr, RANKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a few parents (or grandparents) of one depth say of that depth's candidates. `SUMS`: not normalised, and what they
    say of everything else goes to `rests`."""
    place, ancestor = tl.program_id(0).to(tl.int64), tl.program_id(2)
    ancestor_place = place + ancestor * tl.num_programs(0).to(tl.int64)
    out_weight, out_bias = out_weights + ancestor * (E + 2) * H, out_biases + ancestor * (E + 2)
    parent = tl.program_id(1) * PARENTS + tl.arange(0, PARENTS)
    candidate = tl.arange(0, CANDIDATES)
    there, listed = parent < width, candidate < width
    token = tl.load(token_ids + place * width + candidate, mask=listed, other=0)
    own = tl.load(log_probs + place * width + candidate, mask=listed, other=0.0)
    ranked = tl.load(ranking + place * width + candidate, mask=listed, other=float("-inf"))
    strength = tl.load(strengths + place // depths)
    hidden_rows = hidden + (ancestor_place * width + parent)[:, None] * H
    candidate_rows = candidate_table + token[None, :] * E
    step, ranks = tl.arange(0, STEP), tl.arange(0, RANKS)
    matches = tl.zeros([PARENTS, CANDIDATES], tl.float32)
    for first_rank in range(0, E, RANKS):
        rank = first_rank + ranks
        # Tables of any rank: what is beyond is zero on both sides of the product.
        known = rank < E
        table = tl.load(candidate_rows + rank[:, None], mask=known[:, None] & listed[None, :], other=0.0)
        weight_rows = out_weight + rank[None, :] * H
        query = tl.zeros([PARENTS, RANKS], tl.float32)
        for first in tl.range(0, H, STEP, num_stages=STAGES):
            k = first + step
            rows = tl.load(hidden_rows + k[None, :], mask=there[:, None], other=0.0)
            weight = tl.load(weight_rows + k[:, None], mask=known[None, :], other=0.0)
            query = tl.dot(rows, weight, query, input_precision="ieee")
        query += tl.load(out_bias + rank, mask=known, other=0.0).to(tl.float32)[None, :]
        matches = tl.dot(query.to(table.dtype), table, matches, input_precision="ieee")
    # The drafter's weight and elsewhere: two rows more.
    last = out_weight + E * H
    own_weight, elsewhere = tl.zeros([PARENTS, STEP], tl.float32), tl.zeros([PARENTS, STEP], tl.float32)
    for first in range(0, H, STEP):
        k = first + step
        rows = tl.load(hidden_rows + k[None, :], mask=there[:, None], other=0.0).to(tl.float32)
        own_weight += rows * tl.load(last + k).to(tl.float32)[None, :]
        elsewhere += rows * tl.load(last + H + k).to(tl.float32)[None, :]
    own_weight = tl.sum(own_weight, axis=1) + tl.load(out_bias + E).to(tl.float32)
    elsewhere = tl.sum(elsewhere, axis=1) + tl.load(out_bias + E + 1).to(tl.float32)
    corrections = matches + own_weight[:, None] * tl.maximum(own, least_log_prob)[None, :]
    if SUMS:
        # Depth 1 has no grandparents.
        strength = tl.where((ancestor > 0) & (place % depths == 0), 0.0, strength)
    score = strength * corrections
    rest = strength * elsewhere
    if ancestor == 0:
        score += ranked[None, :]
        rest += tl.log(1.0 - tl.minimum(tl.sum(tl.exp(ranked), axis=0), 1.0 - least_rest))
    if SUMS:
        tl.store(rests + ancestor_place * width + parent, rest, mask=there)
    else:
        # What is -inf among the candidates stays it: the rest is finite.
        most = tl.maximum(tl.max(score, axis=1), rest)
        total = tl.sum(tl.exp(score - most[:, None]), axis=1) + tl.exp(rest - most)
        score = tl.minimum(score - (most + tl.log(total))[:, None], 0.0)
    out = scores + ((ancestor_place * width + parent) * width)[:, None] + candidate[None, :]
    tl.store(out, score, mask=there[:, None] & listed[None, :])


@triton.jit
def _norm_kernel(scores, rests, norms, width, GRANDPARENTS: tl.constexpr, CANDIDATES: tl.constexpr):
    """log-sum-exp over candidates and the rest, of every parent below a few grandparents of one depth."""
    place, count = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    parent, candidate = tl.arange(0, CANDIDATES), tl.arange(0, CANDIDATES)
    there = parent < width
    rows = scores + ((place * width + parent) * width)[:, None] + candidate[None, :]
    below_parent = tl.load(rows, mask=there[:, None] & there[None, :], other=float("-inf"))
    rest = tl.load(rests + place * width + parent, mask=there, other=0.0)
    for grandparent in range(tl.program_id(1) * GRANDPARENTS, tl.minimum(width, (tl.program_id(1) + 1) * GRANDPARENTS)):
        row = (count + place) * width + grandparent
        score = below_parent + tl.load(scores + row * width + candidate, mask=there, other=0.0)[None, :]
        other = rest + tl.load(rests + row)
        most = tl.maximum(tl.max(score, axis=1), other)
        total = tl.sum(tl.exp(score - most[:, None]), axis=1) + tl.exp(other - most)
        tl.store(norms + (place * width + grandparent) * width + parent, most + tl.log(total), mask=there)


def transitions_pooled_triton(
    places: torch.Tensor,
    root_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    ranking: torch.Tensor,
    strengths: torch.Tensor,
    weights: AdapterWeights,
) -> torch.Tensor | PathScores:
    """Same arguments and result as `transitions_pooled`. H is a multiple of 64, M at most 64."""
    num_sequences, depths, width = token_ids.shape
    parent_tables, candidate_table, mix_weights, mix_biases, out_weights, out_biases = weights
    (num_ancestors, vocab_size, size), rank = parent_tables.shape, candidate_table.shape[1]
    num_rows, num_places = token_ids.numel(), num_sequences * depths
    hidden = torch.empty(num_ancestors, num_rows, size, dtype=parent_tables.dtype, device=places.device)
    scores = torch.empty(num_ancestors, num_sequences, depths, width, width, dtype=torch.float32, device=places.device)
    rests = torch.empty(num_ancestors, num_sequences, depths, width, dtype=torch.float32, device=places.device)
    step, ranks, stages = TILES[parent_tables.element_size()]
    rows = max(16, min(64, triton.next_power_of_2(num_rows)))
    candidates = max(16, triton.next_power_of_2(width))
    _mix_kernel[(triton.cdiv(num_rows, rows), size // COLUMNS, num_ancestors)](
        places, root_tokens, token_ids, parent_tables, mix_weights, mix_biases, hidden, num_rows, depths, width, vocab_size,
        H=size, ROWS=rows, COLUMNS=COLUMNS, STEP=step, STAGES=stages, num_warps=4,
    )  # fmt: skip
    _score_kernel[(num_places, triton.cdiv(width, PARENTS), num_ancestors)](
        hidden, token_ids, log_probs, ranking, strengths, candidate_table, out_weights, out_biases, scores, rests, depths, width,
        LEAST_LOG_PROB, LEAST_REST,
        H=size, E=rank, SUMS=num_ancestors > 1, PARENTS=PARENTS, CANDIDATES=candidates,
        STEP=step, RANKS=ranks, STAGES=stages, num_warps=4,
    )  # fmt: skip
    if num_ancestors == 1:
        return scores[0]
    norms = torch.empty_like(scores[0])
    _norm_kernel[(num_places, triton.cdiv(width, GRANDPARENTS))](
        scores, rests, norms, width, GRANDPARENTS=GRANDPARENTS, CANDIDATES=candidates, num_warps=4
    )  # fmt: skip
    return PathScores(*scores, norms)
