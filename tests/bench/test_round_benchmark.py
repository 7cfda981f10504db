"""`benchmarks.rounds` on shapes that a CPU runs in a second."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import rounds


@pytest.mark.parametrize("budget", ["7", "8"])  # captured as 8, and as it is
def test_rounds_driven_by_the_engine_are_timed_at_any_budget(budget, monkeypatch, capsys):
    sizes = ["--contexts", "64", "--prefill", "64", "--repeats", "2", "--device", "cpu", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["rounds", "--shapes", "small-dense", "--parts", "idle", "--budgets", budget, *sizes])
    assert rounds.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["engine"]["tokens_per_s"] > 0 and result["idle_ms"]["median"] < 1000


@pytest.mark.parametrize("summary", ["none", "grandparent"])
def test_what_an_adapter_costs_a_round_is_the_difference_of_two_rounds(summary, monkeypatch, capsys):
    sizes = ["--contexts", "64", "--prefill", "64", "--context", "64", "--repeats", "2", "--device", "cpu", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["rounds", "--shapes", "small-dense", "--parts", "adapter", "--adapter", summary, "--budgets", "7", *sizes])
    assert rounds.main() == 0
    adapter = json.loads(capsys.readouterr().out.splitlines()[-1])["adapter"]
    with_it, without = (adapter["7"][name]["median"] for name in ("conditioned_round_ms", "round_ms"))
    assert adapter["summary"] == summary and adapter["7"]["cost_ms"] == pytest.approx(with_it - without, abs=1e-3)
    assert with_it > without > 0
