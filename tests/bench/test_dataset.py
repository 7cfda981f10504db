"""Data sets of the Hub: whichever of its files and columns hold prompts, once; and what is said where it cannot be had."""

import json

import pytest

from ddtree.bench import dataset
from ddtree.bench.workloads import load_prompts
from ddtree.cli.main import main
from ddtree.sources import SourceError
from ddtree.sources import datasets as hub


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """A data set `org/set` with the files that the test puts into the returned folder."""
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "files"
    folder.mkdir()
    monkeypatch.setattr(dataset, "dataset_files", lambda repo_id: [file.name for file in folder.iterdir()])
    monkeypatch.setattr(dataset, "dataset_file", lambda repo_id, path: folder / path)
    return folder


def test_rows_become_prompts_once(repository):
    (repository / "train.jsonl").write_text('{"question": "no"}\n')
    rows = [{"question": "What is 1 + 1?", "answer": "2"}, {"question": " "}, {"question": "And 2 + 2?"}]
    (repository / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = dataset.dataset_prompts("org/set")
    prompts = load_prompts(str(file))
    assert [(p.id, p.turns) for p in prompts] == [("set-0", ("What is 1 + 1?",)), ("set-2", ("And 2 + 2?",))]
    (repository / "test.jsonl").unlink()
    assert dataset.dataset_prompts("org/set") == file  # offline, from the cache


def test_conversations_tables_and_named_files(repository):
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    (repository / "talk.json").write_text(json.dumps({"data": [{"conversations": said}]}))
    (repository / "table.csv").write_text('instruction,output\n"Write, please",x\n')
    with pytest.raises(SourceError, match="which of its files.*talk.json|which of its files.*table.csv"):
        dataset.dataset_prompts("org/set")
    assert load_prompts(str(dataset.dataset_prompts("org/set:talk.json")))[0].turns == ("a", "c")
    assert load_prompts(str(dataset.dataset_prompts("org/set:table.csv")))[0].turns == ("Write, please",)
    with pytest.raises(SourceError, match="no such file"):
        dataset.dataset_prompts("org/set:absent.csv")


def test_nothing_to_ask_and_no_name(repository):
    (repository / "test.jsonl").write_text('{"label": 3}\n')
    with pytest.raises(SourceError, match="has no column"):
        dataset.dataset_prompts("org/set")
    with pytest.raises(SourceError, match="ORG/NAME"):
        dataset.dataset_prompts("gsm8k")


def test_offline_says_what_to_do(monkeypatch, tmp_path, capsys):
    def unreachable(*args, **options):
        raise OSError("network is unreachable")

    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.list_repo_files", unreachable)
    with pytest.raises(SourceError, match="could not be reached.*--prompts"):
        hub.dataset_files("org/set")
    assert main(["bench", "--dataset", "org/set"]) == 2
    assert "network is unreachable" in capsys.readouterr().err
