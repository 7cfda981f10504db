"""Tree decoding with keyed noise emits the very tokens of plain decoding: a simulation without models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree.sampling.choose import choose, rank_scores
from ddtree.sampling.noise import gumbel_noise, noise_key
from ddtree.sampling.params import SamplingParams
from ddtree.tree.accept import accept
from ddtree.tree.build import build_chain, build_ddtree, top_candidates
from ddtree.tree.draft_tree import ROOT

VOCAB, LENGTH, DEPTH = 5, 24, 4
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.05),
]


class MarkovTarget:
    """Logits after the last two tokens, with noise keyed by the absolute position of the token to be drawn."""

    def __init__(self, seed: int, params: SamplingParams) -> None:
        self.table = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
        self.params = params
        self.noise = gumbel_noise(noise_key(seed, 0, (1, 2)), range(LENGTH + 2 * DEPTH), VOCAB, "cpu")

    def next_tokens(self, prefixes: list[list[int]]) -> np.ndarray:
        logits = torch.stack([self.table[prefix[-2], prefix[-1]] for prefix in prefixes])
        return choose(logits, self.params, self.noise[[len(prefix) for prefix in prefixes]]).numpy()


def plain(target: MarkovTarget) -> list[int]:
    tokens = [1, 2]
    while len(tokens) < LENGTH:
        tokens.append(int(target.next_tokens([tokens])[0]))
    return tokens


def speculative(target: MarkovTarget, budget: int, drafter: str, rng: np.random.Generator) -> tuple[list[int], int]:
    """Tokens and rounds. The drafter ranks at random, or with the target's own noise."""
    tokens, rounds = [1, 2], 0
    while len(tokens) < LENGTH:
        logits = torch.tensor(rng.normal(size=(DEPTH, VOCAB)), dtype=torch.float32)
        params = target.params if drafter == "same noise" else SamplingParams()
        scores = rank_scores(logits, params, target.noise[len(tokens) : len(tokens) + DEPTH])
        build = build_chain if drafter == "chain" else build_ddtree
        tree = build(tokens[-1], top_candidates(scores.numpy(), budget), budget)
        prefixes = [tokens]
        for parent, token in zip(tree.parents[1:], tree.token_ids[1:], strict=True):
            prefixes.append([*prefixes[parent], int(token)])
        acceptance = accept(tree, target.next_tokens(prefixes))
        assert acceptance.path[0] == ROOT
        tokens += acceptance.token_ids.tolist()
        rounds += 1
    return tokens[:LENGTH], rounds


@pytest.mark.parametrize("drafter", ["random", "same noise", "chain"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_tokens_are_those_of_plain_decoding_at_every_budget(params, drafter):
    for seed in range(3):
        target = MarkovTarget(seed, params)
        expected = plain(target)
        for budget in (0, 1, 3, 8, 40):
            tokens, rounds = speculative(target, budget, drafter, np.random.default_rng(seed))
            assert tokens == expected, (seed, budget)
            assert rounds == LENGTH - 2 if budget == 0 else rounds <= LENGTH - 2
            if budget == 40 and drafter != "chain":
                assert rounds < LENGTH - 8  # a tree that wide must be accepted now and then


def test_same_key_same_tokens_and_other_choice_other_tokens():
    params = SamplingParams(temperature=1.0)
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(0))

    def drawn(seed: int, choice_index: int, prompt: tuple[int, ...]) -> list[int]:
        noise = gumbel_noise(noise_key(seed, choice_index, prompt), range(30), 50, "cpu")
        return choose(logits, params, noise).tolist()

    assert drawn(1, 0, (3,)) == drawn(1, 0, (3,))
    others = [drawn(1, 1, (3,)), drawn(2, 0, (3,)), drawn(1, 0, (4,))]
    assert all(other != drawn(1, 0, (3,)) for other in others)
