"""Prompt sets by name and from files; what is wrong with a file is said by line."""

import json
import tomllib
from pathlib import Path

import pytest

from ddtree.bench.workloads import FOLDER, PACKAGED, first_turn, load_prompts, next_turn


def test_packaged_sets_alternate_and_are_limited():
    prompts = load_prompts("humaneval,gsm8k", limit=5)
    assert [p.set for p in prompts] == ["humaneval", "gsm8k"] * 2 + ["humaneval"]
    assert len(load_prompts(",".join(PACKAGED))) == 160


def test_the_package_ships_its_sets_and_their_licences():
    root = Path(__file__).resolve().parents[2]
    shipped = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "ddtree"
    ]
    assert {"bench/prompts/*", "training/openers.json", "training/openers.txt"} <= set(shipped)
    notes = (FOLDER / "README.md").read_text()
    assert all(f"{name}.jsonl" in notes for name in PACKAGED)
    assert sorted(path.stem for path in FOLDER.glob("*.jsonl")) == sorted(PACKAGED), (
        "no set without a licence note"
    )


def test_later_turns_carry_the_reply(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"id": 1, "turns": ["a", "b"]}) + "\n\n")
    (prompt,) = load_prompts(str(file))
    item = first_turn(prompt)
    second = next_turn(prompt, item, "reply")
    assert (item.id, second.id, second.set) == ("1", "1#2", "mine")
    assert [m["content"] for m in second.as_messages()] == ["a", "reply", "b"]
    assert next_turn(prompt, second, "end") is None


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "x"}', '{"id": "x", "turns": []}', '{"turns": ["a"]}'])
def test_a_wrong_line_is_named(tmp_path, line):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"id": "ok", "turns": ["a"]}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        load_prompts(str(file))


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="alpaca.*humaneval"):
        load_prompts("alpaca")
    (tmp_path / "a.jsonl").write_text('{"id": "x", "turns": ["a"]}\n' * 2)
    with pytest.raises(ValueError, match="more than once"):
        load_prompts(str(tmp_path / "a.jsonl"))
