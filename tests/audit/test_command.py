"""ddtree audit on the embedded pair."""

from __future__ import annotations

import json

import pytest

from ddtree.cli.main import main

pytestmark = pytest.mark.real


ARGV = ["audit", "--budgets", "0,16", "--max-tokens", "8", "--limit", "1", "--no-reference", "--device", "cpu", "--dtype", "float32"]


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_smollm2_is_identical(smollm2_path, capsys):
    assert main([*ARGV, "--no-inspect"]) == 0
    found = last_line(capsys)
    assert (found["verdict"], found["drafter"]) == ("identical", "not_inspected") and not found["faults"], found
    assert found["prompts"] == 2 and found["tokens"] == 16 and found["budgets"] == [0, 16] and found["packed"] == 1


@pytest.mark.long
def test_smollm2_and_its_drafter_are_sound_inside(smollm2_path, tmp_path, capsys):
    report = tmp_path / "report.html"
    assert main([*ARGV, "--report", str(report)]) == 0
    found = last_line(capsys)
    assert (found["verdict"], found["drafter"]) == ("identical", "sound") and found["rounds_inspected"] > 5, found
    assert "<svg" in report.read_text(encoding="utf-8")


def test_a_server_that_renders_raw_prompts_is_found(smollm2_path, monkeypatch, capsys):
    from ddtree.server.text import Text
    from ddtree.text import render_chat

    sound = Text.encode

    def rendering(self, text, param, add_special_tokens=True):
        if param == "prompt":
            text, add_special_tokens = render_chat(self._tokenizer, [{"role": "user", "content": text}]), False
        return sound(self, text, param, add_special_tokens)

    monkeypatch.setattr(Text, "encode", rendering)
    argv = ["audit", "--budgets", "0", "--max-tokens", "2", "--limit", "1", "--no-reference", "--device", "cpu"]
    assert main(argv) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "a chat template was applied to a raw completion" in found["faults"][0]["where"]


@pytest.mark.parametrize("argv", [["--budgets", "x"], ["--budgets", ""], ["--max-tokens", "1"], ["--temperature", "3"]])
def test_bad_flags(argv, capsys):
    with pytest.raises(SystemExit):
        main(["audit", *argv])
    assert "error" in capsys.readouterr().err
