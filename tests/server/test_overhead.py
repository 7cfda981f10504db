"""The benchmark of the server's own time asks of the engine's parts what the engine asks."""

import json
import sys

import pytest


@pytest.mark.real
def test_every_setting_is_answered(smollm2_path, monkeypatch, capsys):
    from benchmarks import server_overhead

    monkeypatch.setattr(sys, "argv", ["server_overhead", "--tokens", "120", "--steps", "1,4", "--repeats", "1"])
    server_overhead.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 8  # a setting that fails raises
