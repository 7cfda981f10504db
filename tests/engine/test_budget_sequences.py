"""Any sequence of budgets, plain rounds among them: same output, and a drafter that has missed nothing."""

import numpy as np
import pytest
import torch

from ddtree.engine import drafter as drafter_module
from ddtree.engine.drafter import Drafter
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from tests.engine.test_decode_round import PROMPT, alone
from tests.models.qwens import LINEAR, PeekingDrafter, drafter_for, engine_around, reference
from tests.models.tiny import random_ids, saved_and_loaded
from tests.scripted import scripted_engine

FAMILIES = {
    "Qwen3": ("Qwen3Config", {"intermediate_size": 48, "num_hidden_layers": 3}),
    "Qwen3_5": ("Qwen3_5TextConfig", LINEAR | {"intermediate_size": 48}),
}
KINDS = {"alternating": [0, 8], "long plain": [0] * 45 + [16, 3], "rare plain": [4, 16, 64, 0], "deep and not": [1, 64, 0, 0, 2]}


def written(engine, request, budgets, seed=0):
    """The request's tokens, its budget set anew before every round."""
    rng, tokens = np.random.default_rng(seed), []
    request_id = engine.add(request)
    turn = 0
    while engine.has_work:
        sequence = engine.running_or_none(request_id)
        if sequence is not None and sequence.num_emitted:
            sequence.tree_budget = budgets[turn % len(budgets)]
            sequence.draft_depth = int(rng.integers(1, 9)) if rng.random() < 0.5 else None
            turn += 1
        for emission in engine.step():
            assert emission.finish_reason != "error", emission.error
            tokens.extend(emission.token_ids)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scripted(kind, skill, temperature):
    request = Request(PROMPT, 120, SamplingParams(temperature=temperature), seed=5, tree_budget=16)
    assert written(scripted_engine(skill), request, KINDS[kind]) == alone(request)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """A random target, dense and hybrid, and a random drafter for it."""
    torch.manual_seed(3)
    config_class, changes = FAMILIES[request.param]
    target = saved_and_loaded(reference(request.param, config_class, **changes), tmp_path_factory.mktemp(request.param))
    torch.manual_seed(4)
    return target, drafter_for(target.config)


class WatchedDrafter(PeekingDrafter):
    """Compares the context it drafts from with one that absorbed every token at once."""

    def open(self, sequence):
        super().open(sequence)
        self.twin, self.num_compared = self.model.new_cache(), 0

    def absorb(self, sequence, features):
        if not self.catching_up:
            self.model.absorb(features, self.twin)
        super().absorb(sequence, features)

    catching_up = False

    def _catch_up(self, sequence):
        self.catching_up = True
        super()._catch_up(sequence)
        self.catching_up = False

    def commit(self, sequences, features):
        for sequence, rows in zip(sequences, features, strict=True):
            if not sequence.tree_budget:
                self.model.absorb(rows, self.twin)
        super().commit(sequences, features)

    def draft(self, sequences):
        found = super().draft(sequences)
        for sequence, candidates in zip(sequences, found, strict=True):
            if candidates is None:
                continue
            own = sequence.drafter_state
            assert own.context_length == self.twin.context_length == sequence.context_length
            for mine, its in zip(own.layers, self.twin.layers, strict=True):
                torch.testing.assert_close(keys_of(mine), keys_of(its), rtol=1e-4, atol=1e-4)
            self.num_compared += 1
        return found


def keys_of(cache):
    """`[Hkv, T, D]` committed."""
    nothing = torch.empty(0, cache._keys.shape[0], cache._keys.shape[2])
    return cache.stage(nothing, nothing)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_real_models(pair, kind):
    target, model = pair
    prompt = tuple(random_ids(30).tolist())
    request = Request(prompt, 100, tree_budget=16)
    plain = list(engine_around(target, Drafter(model, target)).generate(Request(prompt, 100)).token_ids)
    drafter = WatchedDrafter(model, target)
    drafter.script = (*prompt, *plain)
    assert written(engine_around(target, drafter), request, KINDS[kind]) == plain
    assert drafter.num_compared >= 2


def test_what_waits_is_bounded_and_dropped_at_the_end(pair):
    target, model = pair
    drafter = Drafter(model, target)
    engine = engine_around(target, drafter)
    request_id = engine.add(Request(tuple(random_ids(9).tolist()), 100, tree_budget=16))
    engine.step()
    sequence, most = engine.running(request_id), 0
    sequence.tree_budget = 0
    for _ in range(80):
        engine.step()
        most = max(most, len(sequence.pending_features))
    assert 0 < most < drafter_module.MOST_PENDING
    waiting = len(sequence.pending_features)
    assert sequence.drafter_state.context_length == sequence.context_length - waiting
    engine.abort(request_id)
    assert not sequence.pending_features
