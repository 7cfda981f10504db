"""A difference is claimed only where the intervals part."""

import json

import pytest

from ddtree.bench.compare import NO_DIFFERENCE, compare, read_result
from ddtree.cli.main import main
from tests.bench.results import finished


def test_verdicts():
    same = compare(finished(), finished(factor=1.005))
    assert {row["tokens_per_s"]["verdict"] for row in same["configs"].values()} == {NO_DIFFERENCE}
    slower = compare(finished(), finished(factor=1.3))["configs"]
    assert slower["0"]["tokens_per_s"]["verdict"] == NO_DIFFERENCE
    assert slower["8"]["tokens_per_s"]["verdict"] == slower["8"]["speedup"]["verdict"] == "slower"
    assert slower["8"]["speedup"]["change_percent"] == pytest.approx(100 * (1 / 1.3 - 1), abs=0.1)
    assert compare(finished(1.3), finished())["configs"]["8"]["tokens_per_s"]["verdict"] == "faster"
    noisy = compare(finished(jitter=0.5), finished(factor=1.1, jitter=0.5))
    assert noisy["configs"]["8"]["tokens_per_s"]["verdict"] == NO_DIFFERENCE


def test_unlike_runs_are_named():
    found = compare(finished(), finished(device="another", eos_policy="ignored"))
    assert set(found["differs_in"]) == {"device", "eos_policy"}
    modes = compare(finished(batch_invariant=False), finished(batch_invariant=True))
    assert modes["differs_in"] == {"batch_invariant": [False, True]}


def test_a_refused_run_is_not_compared():
    with pytest.raises(ValueError, match="second run was refused"):
        compare(finished(), {"refused": True})


def test_the_command_reads_files_and_logs(tmp_path, capsys):
    one, log, wrong = tmp_path / "a.json", tmp_path / "b.log", tmp_path / "c"
    one.write_text(json.dumps(finished(), indent=1))
    log.write_text("a table\n" + json.dumps(finished(factor=1.3)) + "\n")
    assert main(["bench", "--compare", str(one), str(log)]) == 0
    out = capsys.readouterr().out
    assert "slower" in out and NO_DIFFERENCE in out
    assert json.loads(out.splitlines()[-1])["configs"]["8"]["speedup"]["verdict"] == "slower"
    wrong.write_text("nothing")
    with pytest.raises(ValueError, match="last line"):
        read_result(wrong)
    assert main(["bench", "--compare", str(one), str(tmp_path / "none")]) == 2
