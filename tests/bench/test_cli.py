"""The command over scripted actors: exit statuses, the last line, and what the audit would be asked."""

import json
import shlex
from argparse import Namespace

import pytest

from ddtree.bench.workloads import Prompt
from ddtree.cli import bench
from ddtree.cli.main import build_parser, main
from tests.bench.fakes import Letters
from tests.cli.stubs import SOURCE
from tests.scripted import scripted_engine
from tests.server.fakes import ByteTokenizer


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    import ddtree.bench.offline
    import ddtree.cli.loaded

    monkeypatch.setattr(ddtree.cli.loaded, "find", lambda args: (SOURCE, ByteTokenizer()))
    monkeypatch.setattr(ddtree.cli.loaded, "load", lambda args, source: scripted_engine(0.7))
    monkeypatch.setattr(ddtree.bench.offline, "Text", lambda tokenizer, thinking: Letters())
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"id": f"m{i}", "turns": [f"say {i}"]}) + "\n" for i in range(3)))

    def run(*argv):
        code = main(["bench", "toy", "--prompts", str(file), "--max-tokens", "20", "--repeats", "2", *argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_run_ends_with_json_and_writes_it(command, tmp_path):
    code, out, err = command("--ignore-eos", "--budgets", "chain,8", "--out", str(tmp_path / "r.json"))
    assert code == 0 and "pass 2 of 2" in err
    last = json.loads(out.splitlines()[-1])
    assert list(last["configs"]) == ["0", "chain", "8"] and last["drafter"] == "toy-dflash"
    assert json.loads((tmp_path / "r.json").read_text()) == last


def test_a_refusal_is_status_1(command):
    code, out, _ = command("--budgets", "8")
    last = json.loads(out.splitlines()[-1])
    assert code == 1 and last["refused"] is True and last["reasons"]
    assert "ddtree audit toy --budgets 0,8 --max-tokens 20" in out


def test_budgets():
    assert bench.budgets("16, 4,chain,016,auto") == ("0", "16", "4", "chain", "auto")
    assert bench.budgets("8:factorised,auto:factorised,8") == ("0", "8:factorised", "auto:factorised", "8")
    assert bench.budgets("chain:factorised") == ("0", "chain:factorised")
    for wrong in ("4,x", "0:factorised", "8:conditioned"):
        with pytest.raises(SystemExit):
            main(["bench", "--budgets", wrong])


def test_the_audit_command_carries_the_flags():
    args = Namespace(
        budgets=("0", "chain", "8"),
        max_tokens=9,
        drafter="d",
        dtype="auto",
        device="cpu",
        temperature=0.5,
        seed=3,
    )
    prompt = Prompt("p", ("x",), "mine", file="my set.jsonl", number=4)
    line = (
        "ddtree audit m --budgets 0,{} --max-tokens 9 --prompts 'my set.jsonl' --limit 4 --temperature 0.5 --seed 3 "
        "--drafter d --device cpu"
    )
    assert bench.audit_command(args, "m", prompt, "4") == line.format(4)
    assert bench.audit_command(args, "m", prompt, "0") == line.format(8)


def test_the_audit_command_is_one_that_the_audit_takes(command):
    code, out, _ = command("--budgets", "8")
    line = json.loads(out.splitlines()[-1])["reasons"][0]["audit"]
    parsed = build_parser().parse_args(shlex.split(line)[1:])
    assert parsed.command == "audit" and parsed.prompts.is_file()


def test_prompts_that_are_not_there(command):
    code, _, err = command("--prompts", "nowhere.jsonl")
    assert code == 2 and "nowhere.jsonl" in err and "humaneval" in err


def test_concurrency_needs_a_server(command):
    code, _, err = command("--concurrency", "4")
    assert code == 2 and "--url" in err
    code, _, err = command("--url", "http://x", "--batch-invariant")
    assert code == 2 and "ddtree serve --batch-invariant" in err
    with pytest.raises(SystemExit):
        main(["bench", "--rate", "0"])
