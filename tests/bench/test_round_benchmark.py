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
