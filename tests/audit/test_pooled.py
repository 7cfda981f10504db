"""Faults that are over pools alone, where no hook sees: the first layer whose memory is wrong is named."""

from __future__ import annotations

import pytest
import torch

from ddtree.audit.plan import Plan
from ddtree.audit.pooled import pool_fault
from ddtree.caches import pools
from ddtree.engine.device_round import DeviceRound
from ddtree.models import pooled_target
from ddtree.sampling.params import SamplingParams
from tests.audit.pairs import audited
from tests.engine.pools import Pair, ask, tokens

PLAN = Plan(budgets=(0, 12), max_tokens=8)
# A random drafter guesses best where it knows the noise that the target will draw with.
SAMPLED = {"budget": 16, "max_tokens": 40, "sampling": SamplingParams(temperature=1.5)}


@pytest.fixture(scope="module", name="pairs")
def _pairs():
    return {family: Pair(family) for family in ("llama", "hybrid")}


def where(pair: Pair, most_rounds: int = 12, **options) -> str | None:
    engine = pair.engine()
    fault = pool_fault(engine, [ask(tokens(3, 9), **(SAMPLED | options))], most_rounds=most_rounds)
    assert engine.device_rounds.runs_ahead and not engine.has_work
    return fault and fault.where


def first_rows(path: torch.Tensor) -> torch.Tensor:
    """The fault of many servers: as many rows as the path has nodes, the first ones."""
    return torch.arange(path.shape[1], dtype=path.dtype).expand_as(path).contiguous()


@pytest.mark.parametrize("family", ["llama", "hybrid"])
def test_sound_pools_are_sound(pairs, family):
    for options in ({}, {"sampling": SamplingParams()}, {"budget": 0}):
        assert where(pairs[family], 3, **options) is None


@pytest.mark.parametrize("family", ["llama", "hybrid"])
def test_an_audit_runs_all_that_is_served(pairs, family, monkeypatch, caplog):
    """Prompts side by side in one forward too, and nothing fails on the way that the engine would hide."""
    engine, together = pairs[family].engine(), []
    run = engine.target.prompts.run

    def seen(token_ids, *rest):
        together.append(len(token_ids))
        return run(token_ids, *rest)

    monkeypatch.setattr(engine.target.prompts, "run", seen)
    result = audited(engine, plan=PLAN)
    assert result.passed and max(together) > 1
    assert not caplog.records, caplog.text


def test_pages_of_the_first_rows(pairs, monkeypatch):
    """By a whole audit, which finds a mismatch, and nothing wrong in caches of the sequence's own."""
    sound = pools.commit_pages

    def wrong(keys, values, table, slots, lengths, path, *rest):
        return sound(keys, values, table, slots, lengths, first_rows(path), *rest)

    monkeypatch.setattr(pools, "commit_pages", wrong)
    result = audited(pairs["llama"].engine(), plan=PLAN)
    assert result.verdict == "mismatch"
    assert any(fault.where.startswith("pools: layer 0 keys of token") and "after commit of path" in fault.where for fault in result.faults)


def test_a_state_that_folds_the_first_rows_in(pairs, monkeypatch):
    sound = pools.gated_delta_commit_pooled

    def wrong(states, keys, solved, log_decays, slots, starts, path, lengths):
        return sound(states, keys, solved, log_decays, slots, starts, first_rows(path), lengths)

    monkeypatch.setattr(pools, "gated_delta_commit_pooled", wrong)
    assert "recurrent state after commit of path" in where(pairs["hybrid"])


def test_a_tree_row_that_sees_its_siblings(pairs, monkeypatch):
    sound = pooled_target.tree_attention_pooled

    def leaking(*given):
        *before, mask, scale, most = given
        return sound(*before, mask if mask is None else torch.ones_like(mask).tril(), scale, most)

    monkeypatch.setattr(pooled_target, "tree_attention_pooled", leaking)
    found = where(pairs["llama"])
    assert "pools: layer 1 keys of token" in found and "what layer 0 makes of these rows comes before" in found


def test_features_of_the_first_rows(pairs, monkeypatch):
    sound = DeviceRound.commit
    monkeypatch.setattr(DeviceRound, "commit", lambda self, rows, path, *rest: sound(self, rows, first_rows(path), *rest))
    assert "pools: drafter layer 0" in where(pairs["llama"])
