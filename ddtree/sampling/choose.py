"""Logits to one chosen token per row: greedy, or keyed Gumbel noise after temperature, top-k, top-p and min-p.

Every row is treated alone: neither the other rows nor their number change its token. Ties go to the lowest token id,
also at a filter's cut. Logits of -inf are tokens that cannot be drawn; NaN is not looked for, as that would cost a
pass: a caller that cannot rule it out checks first. Filters and ties synchronise with a CUDA device.

Letters: N rows, V vocabulary. "Scaled" logits are (logits - row maximum) / temperature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddtree.sampling.params import SamplingParams

# Where the search for a row's top-p set starts; it grows until every row's set is inside.
FIRST_NUCLEUS = 1024
# Keeps (logits - max) / temperature clear of 0 / 0 in fp32; below it the draw is an argmax anyway.
LEAST_TEMPERATURE = 1e-30
# How far the drafter's ranking trusts its own logits and the request's noise; measured, docs/log.md 2026-11-29.
RANK_LOGITS, RANK_NOISE = 0.8, 0.67


def choose(logits: Tensor, params: SamplingParams, noise: Tensor | None) -> Tensor:
    """One token per row: `logits [N, V]`, `noise [N, V]` float32 Gumbel (None when greedy) -> `[N]` int64.

    Greedy is the argmax. Otherwise argmax(scaled logits + noise) over the tokens that the filters keep, which is a
    draw from the filtered softmax. Raises ValueError when temperature > 0 and there is no noise.
    """
    if params.greedy:
        return logits.argmax(dim=-1)
    scaled = _scale(logits, params)
    return _perturb(scaled, _keep(scaled, params), noise).argmax(dim=-1)


def rank_scores(logits: Tensor, params: SamplingParams, noise: Tensor | None) -> Tensor:
    """What the drafter ranks with: `[N, V]` float32 normalised log-probabilities.

    Greedy: log_softmax(logits). Temperature > 0: log_softmax(RANK_LOGITS * scaled logits + RANK_NOISE * noise) with the
    very noise that the target will draw with, so that the drafter guesses the token about to be drawn (design.md §5).
    Both weights are below 1 because the drafter is not the target: the scores stay wide enough to be right about how
    often a guess fails. They move acceptance, never the output. Filters are left out: they are the target's.
    """
    if params.greedy:
        return logits.float().log_softmax(dim=-1)
    ratio = RANK_LOGITS / RANK_NOISE
    return (_perturb(_scale(logits, params) * ratio, None, noise) * RANK_NOISE).log_softmax(dim=-1)


def rank_strength(params: SamplingParams) -> float:
    """What a nat of the drafter's logits is worth in `rank_scores`."""
    return 1.0 if params.greedy else RANK_LOGITS / max(params.temperature, LEAST_TEMPERATURE)


def margins(logits: Tensor, params: SamplingParams, noise: Tensor | None) -> Tensor:
    """How far each row's choice is from another one: `[N]` float32, +inf when nothing competes.

    Greedy: best minus second logit. Temperature > 0, in scaled logits, the least of

    - the gap of the perturbed scores between the chosen token and the best other token that the filters keep;
    - the distance at which a filter would drop the chosen token;
    - for a token left out, the greater of its distance to the filters' cut and its gap to the chosen token.

    A token's distance to top-k is its gap to the nearest token across the cut; to min-p its gap to the threshold; to
    top-p the lesser of its gap across the cut and |logit(mass before it) - logit(top_p)|, the shift of all better
    tokens against all others that moves the cut over it. No change of all gaps by less than the margin changes the
    choice; with top-p this is an estimate, which counts a swap and a shift of mass singly, not both at once. For
    audits: with top-p it sorts the whole vocabulary.
    """
    if params.greedy:
        return _gap(logits.float())
    scaled = _scale(logits, params)
    keep = _keep(scaled, params)
    margin = _gap(_perturb(scaled, keep, noise))
    if keep is None:
        return margin
    perturbed = _perturb(scaled, None, noise)
    chosen = perturbed.masked_fill(~keep, -math.inf).argmax(dim=-1, keepdim=True)
    to_leave, to_enter = _cut_distances(scaled, params)
    to_win = torch.maximum(to_enter, perturbed.gather(1, chosen) - perturbed)
    to_enter = to_win.masked_fill(keep, math.inf).amin(dim=-1)
    return torch.minimum(margin, torch.minimum(to_leave.gather(1, chosen).squeeze(1), to_enter))


def _scale(logits: Tensor, params: SamplingParams) -> Tensor:
    logits = logits.float()
    # A tensor, for by a number PyTorch multiplies with its inverse on a GPU: a bit off what the device's own rounds draw with.
    temperature = torch.full((), max(params.temperature, LEAST_TEMPERATURE), device=logits.device)
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def _perturb(scaled: Tensor, keep: Tensor | None, noise: Tensor | None) -> Tensor:
    if noise is None:
        raise ValueError("temperature > 0 needs noise, got None; pass gumbel_noise(...) for each row's position")
    scores = scaled + noise
    return scores if keep is None else scores.masked_fill_(~keep, -math.inf)


def _gap(scores: Tensor) -> Tensor:
    """Best minus second score of each row; +inf where there is no finite second."""
    if scores.shape[-1] < 2:
        return scores.new_full(scores.shape[:-1], math.inf)
    best = scores.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


def _keep(scaled: Tensor, params: SamplingParams) -> Tensor | None:
    """`[N, V]` bool: the tokens that top-k, top-p and min-p keep, in that order; None when all are off."""
    if not params.filtered:
        return None
    keep = None
    if 0 < params.top_k < scaled.shape[-1]:
        cut = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        keep = _keep_best(scaled, cut, torch.full_like(cut, params.top_k, dtype=torch.int64))
    if params.top_p < 1:
        survivors = scaled if keep is None else scaled.masked_fill(~keep, -math.inf)
        keep = _keep_best(survivors, *_nucleus(survivors, params))
    if params.min_p > 0:
        likely = scaled >= math.log(params.min_p)
        keep = likely if keep is None else keep & likely
    return torch.ones_like(scaled, dtype=torch.bool) if keep is None else keep


def _keep_best(scaled: Tensor, cut: Tensor, count: Tensor) -> Tensor:
    """The `count [N, 1]` best tokens of each row, whose least value is `cut [N, 1]`; ties to the lowest id."""
    keep = scaled > cut
    tied = scaled == cut
    room = count - keep.sum(dim=-1, keepdim=True)
    if (tied.sum(dim=-1, keepdim=True) > room).any():
        tied &= tied.cumsum(dim=-1) <= room
    return keep | tied


def _nucleus(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Least value and size, `[N, 1]` each, of the smallest best-first set whose mass reaches top_p."""
    vocab_size = scaled.shape[-1]
    total = scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    width = min(params.top_k or FIRST_NUCLEUS, vocab_size)
    while True:
        best = scaled.topk(width, dim=-1).values
        mass = best.double().exp().cumsum(dim=-1) / total
        if width == vocab_size or (mass[:, -1] >= params.top_p).all():
            break
        width = min(width * 8, vocab_size)
    # A token stays while the mass before it falls short.
    count = (mass[:, :-1] < params.top_p).sum(dim=-1, keepdim=True) + 1
    return best.gather(1, count - 1), count


def _cut_distances(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """`[N, V]` each, in scaled logits: how far a kept token is from leaving, an excluded one from entering.

    A token leaves through the nearest filter, and enters only when it has passed every one that excludes it.
    """
    to_leave = torch.full_like(scaled, math.inf)
    to_enter = torch.zeros_like(scaled)
    survivors = scaled
    if 0 < params.top_k < scaled.shape[-1]:
        keep = _keep(scaled, SamplingParams(params.temperature, top_k=params.top_k))
        distance = _gap_across(survivors, keep)
        to_leave = torch.where(keep, torch.minimum(to_leave, distance), to_leave)
        to_enter = torch.where(keep, to_enter, torch.maximum(to_enter, distance))
        survivors = scaled.masked_fill(~keep, -math.inf)
    if params.top_p < 1:
        keep = _keep_best(survivors, *_nucleus(survivors, params))
        distance = torch.minimum(_gap_across(survivors, keep), _mass_distance(survivors, params.top_p))
        alive = survivors > -math.inf
        to_leave = torch.where(keep, torch.minimum(to_leave, distance), to_leave)
        to_enter = torch.where(keep | ~alive, to_enter, torch.maximum(to_enter, distance))
    if params.min_p > 0:
        distance = scaled - math.log(params.min_p)
        to_leave = torch.where(distance >= 0, torch.minimum(to_leave, distance), to_leave)
        to_enter = torch.where(distance >= 0, to_enter, torch.maximum(to_enter, -distance))
    return to_leave, to_enter


def _gap_across(scaled: Tensor, keep: Tensor) -> Tensor:
    """Each kept token's gap to the best one left out, each other token's to the worst one kept."""
    best_out = scaled.masked_fill(keep, -math.inf).amax(dim=-1, keepdim=True)
    worst_in = scaled.masked_fill(~keep, math.inf).amin(dim=-1, keepdim=True)
    return torch.where(keep, scaled - best_out, worst_in - scaled)


def _mass_distance(scaled: Tensor, top_p: float) -> Tensor:
    """|logit(mass before each token) - logit(top_p)|, +inf for the best token, which top-p never drops."""
    order = scaled.double().sort(dim=-1, descending=True, stable=True)
    probs = order.values.softmax(dim=-1)
    before = (probs.cumsum(dim=-1) - probs).clamp_(0, 1)
    before[:, 0] = 0
    distance = (torch.logit(before) - math.log(top_p / (1 - top_p))).abs()
    return torch.empty_like(distance).scatter_(1, order.indices, distance).float()
