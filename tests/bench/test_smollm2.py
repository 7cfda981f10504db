"""The user's bad day on the real pair: a sweep over four-token replies is refused, forced length is labelled."""

import json

import pytest

from ddtree.cli.main import main

pytestmark = pytest.mark.real

SHORT = ["Answer yes.", "What is 2+2? Answer with one number."]


@pytest.fixture
def bench(smollm2_path, tmp_path, capsys):
    def run(prompts, *argv):
        file = tmp_path / "prompts.jsonl"
        file.write_text(
            "".join(json.dumps({"id": f"p{i}", "turns": [p]}) + "\n" for i, p in enumerate(prompts))
        )
        code = main(["bench", "smollm2", "--device", "cpu", "--prompts", str(file), *argv])
        out = capsys.readouterr().out
        return code, out, json.loads(out.splitlines()[-1])

    return run


def test_replies_of_a_few_tokens_are_refused(bench):
    code, out, result = bench(SHORT, "--budgets", "16", "--max-tokens", "32")
    assert code == 1 and result["refused"] is True and "configs" not in result
    (reason,) = result["reasons"]
    assert reason["kind"] == "short" and reason["prompt_ids"] == ["p0", "p1"]
    assert (
        reason["text"]
        and reason["text"] == reason["plain_text"]
        and reason["audit"].startswith("ddtree audit")
    )
    assert "tokens/s" not in out


def test_a_forced_length_is_labelled(bench, tmp_path):
    pytest.importorskip("matplotlib")
    argv = [
        "--budgets",
        "8",
        "--max-tokens",
        "20",
        "--repeats",
        "1",
        "--ignore-eos",
        "--plot",
        str(tmp_path / "plots"),
    ]
    code, out, result = bench(SHORT[:1], *argv)
    assert code == 0 and result["eos_policy"].startswith("ignored") and "EOS ignored (--ignore-eos)" in out
    assert (
        result["modes"] == {"0": ["target_only"], "8": ["ddtree"]} and result["output_tokens"]["median"] == 20
    )
    assert result["configs"]["8"]["acceptance_length"] >= 1 and result["configs"]["0"]["floor_ms"] > 0
    assert set(result["predicted"]) == {"0", "8"} and result["memory"]["peak_rss_bytes"] > 0
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"bench.png", "bench.html"}
