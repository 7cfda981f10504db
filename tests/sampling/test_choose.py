"""Choices follow the filtered law, rows are alone, and margins bound what it takes to change a choice."""

from __future__ import annotations

import math

import pytest
import torch

from ddtree.sampling.choose import choose, margins, rank_scores
from ddtree.sampling.noise import gumbel_noise, noise_key
from ddtree.sampling.params import SamplingParams

FILTERS = [
    {},
    {"top_k": 3},
    {"top_k": 100},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


def naive_law(logits: list[float], params: SamplingParams) -> list[float]:
    """The filtered softmax, one token at a time, ties to the lowest id."""
    scaled = [logit / params.temperature for logit in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if params.top_k:
        order = order[: params.top_k]
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    if params.top_p < 1:
        total, mass, kept = sum(weights.values()), 0.0, []
        for token in order:
            if mass / total >= params.top_p:
                break
            kept.append(token)
            mass += weights[token]
        order = kept
    order = [token for token in order if weights[token] >= params.min_p]
    total = sum(weights[token] for token in order)
    return [weights[token] / total if token in order else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_filtered_softmax(filters, temperature):
    params = SamplingParams(temperature=temperature, **filters)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4)) * 2
    law = torch.tensor(naive_law(logits.tolist(), params))
    noise = gumbel_noise(noise_key(3, 0, (1,)), range(2000), 12, "cpu")
    tokens = choose(logits.expand(2000, -1), params, noise)
    counts = torch.bincount(tokens, minlength=12)
    kept = law > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - 2000 * law)[kept] ** 2 / (2000 * law)[kept]).sum().item()
    degrees = int(kept.sum()) - 1
    assert chi_square <= degrees + 3.5 * (2 * degrees) ** 0.5 + 4


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_choice_is_the_best_perturbed_score_of_the_law_with_ties(filters):
    generator = torch.Generator().manual_seed(0)
    # Rounded logits tie often, also at the cuts.
    logits = (torch.randn(200, 12, generator=generator) * 2).round()
    noise = gumbel_noise(8, range(200), 12, "cpu")
    params = SamplingParams(temperature=0.8, **filters)
    law = torch.tensor([naive_law(row, params) for row in logits.tolist()])
    expected = (law.log() + noise).argmax(dim=-1)
    assert torch.equal(choose(logits, params, noise), expected)


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-math.inf, -math.inf, 0.0, -1.0]])
    assert choose(logits, SamplingParams(), None).tolist() == [1, 0, 2]
    assert choose(logits, SamplingParams(top_k=1, top_p=0.5), None).tolist() == [1, 0, 2]


def test_perturbed_ties_and_cut_ties_go_to_the_lowest_id():
    flat = torch.zeros(1, 5)
    for filters in ({}, {"top_k": 2}, {"top_p": 0.4}, {"min_p": 1.0}):
        assert choose(flat, SamplingParams(temperature=1, **filters), torch.zeros(1, 5)).item() == 0
    wild = torch.tensor([[0.0, 0.0, 9.0, 9.0, 9.0]])  # the noise prefers what the cut leaves out
    assert choose(flat, SamplingParams(temperature=1, top_k=2), wild).item() == 0
    assert choose(flat, SamplingParams(temperature=1, top_p=0.4), wild).item() == 0


def test_infinite_logits_and_tiny_temperatures():
    noise = gumbel_noise(1, range(1), 4, "cpu")
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]])
    for filters in FILTERS:
        assert choose(logits, SamplingParams(temperature=1, **filters), noise).item() in (1, 2)
        for temperature in (1e-6, 1e-40, 5e-324):
            assert choose(logits, SamplingParams(temperature=temperature, **filters), noise).item() == 2


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_rows_are_alone(filters):
    generator = torch.Generator().manual_seed(1)
    # One flat row among peaked ones widens the top-p search for all.
    logits = torch.randn(6, 5000, generator=generator) * torch.tensor([0.0, 0.1, 1, 3, 6, 10])[:, None]
    noise = gumbel_noise(2, range(6), 5000, "cpu")
    params = SamplingParams(temperature=0.9, **filters)
    together, margin = choose(logits, params, noise), margins(logits, params, noise)
    for row in range(6):
        alone = slice(row, row + 1)
        assert choose(logits[alone], params, noise[alone]).item() == together[row]
        assert margins(logits[alone], params, noise[alone]).item() == margin[row]


def test_sampling_without_noise_is_refused():
    for call in (choose, rank_scores, margins):
        with pytest.raises(ValueError, match="needs noise, got None"):
            call(torch.zeros(1, 3), SamplingParams(temperature=1), None)


def test_rank_scores_are_normalised_and_rank_like_the_draw():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(2)) * 3
    noise = gumbel_noise(9, range(50), 40, "cpu")
    torch.testing.assert_close(rank_scores(logits, SamplingParams(), None), logits.log_softmax(-1))
    params = SamplingParams(temperature=0.7)
    scores = rank_scores(logits, params, noise)
    torch.testing.assert_close(scores, (0.8 * logits / 0.7 + 0.67 * noise).log_softmax(-1))
    assert (scores <= 0).all()
    drawn = choose(logits, params, noise)
    assert (scores.argmax(-1) == drawn).float().mean() > 0.85
    assert (logits.argmax(-1) == drawn).float().mean() < (scores.argmax(-1) == drawn).float().mean()


def test_margins_by_hand():
    logits = torch.tensor([[4.0, 1.0, 3.5, -math.inf]])
    quiet = torch.zeros(1, 4)
    assert margins(logits, SamplingParams(), None).item() == 0.5
    assert margins(logits, SamplingParams(temperature=0.5), quiet).item() == 1.0
    # Top-k 2 keeps tokens 0 and 2; the noise lifts token 1, left out by 2.5, above the choice.
    lifted = torch.tensor([[9.0, 20.0, 0.0, 0.0]])
    assert margins(logits, SamplingParams(temperature=1, top_k=2), lifted).item() == 2.5
    # Min-p e^-0.6 keeps tokens 0 and 2; the choice, token 2, is 0.1 above the threshold.
    swapped = torch.tensor([[0.0, 0.0, 9.0, 0.0]])
    margin = margins(logits, SamplingParams(temperature=1, min_p=math.exp(-0.6)), swapped).item()
    assert margin == pytest.approx(0.1, abs=1e-6)
    assert margins(logits[:, :1], SamplingParams(), None).item() == math.inf
    assert margins(logits, SamplingParams(temperature=1, top_k=1), quiet).item() == 0.5


def test_top_p_margin_is_the_distance_of_the_mass_to_the_cut():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    chosen_second = torch.tensor([[0.0, 9.0, 0.0, 0.0]])
    # Token 1 stays because the mass before it, 0.5, is short of 0.52.
    margin = margins(probs.log(), SamplingParams(temperature=1, top_p=0.52), chosen_second).item()
    assert margin == pytest.approx(math.log(0.52 / 0.48), abs=1e-5)
    # At 0.49 it is out, its noise would win, and the mass is beyond the cut by as much.
    margin = margins(probs.log(), SamplingParams(temperature=1, top_p=0.49), chosen_second).item()
    assert margin == pytest.approx(math.log(0.51 / 0.49), abs=1e-5)


@pytest.mark.parametrize("filters", [f for f in FILTERS if f != {"min_p": 1.0}], ids=str)
def test_a_change_well_below_the_margin_changes_nothing(filters):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(400, 12, generator=generator) * 2
    noise = gumbel_noise(4, range(400), 12, "cpu")
    params = SamplingParams(temperature=0.8, **filters)
    margin, tokens = margins(logits, params, noise), choose(logits, params, noise)
    assert (margin >= 0).all()
    for _ in range(20):
        # A gap moves by at most twice the change of a logit.
        change = (torch.rand(400, 12, generator=generator) * 2 - 1) * margin.clamp(max=50)[:, None] * 0.8 * 0.24
        changed = (choose(logits + change, params, noise) != tokens).float().mean()
        # With top-p the margin is an estimate (see its docstring).
        assert changed <= (0.01 if "top_p" in filters else 0)
