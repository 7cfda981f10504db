"""The openers are ours: none shares six words in a row with an evaluation prompt."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddtree.training import openers

PROMPTS = next((up / "shared/prompts" for up in Path(__file__).resolve().parents if (up / "shared/prompts").is_dir()), None)


def spans(text: str, size: int) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


@pytest.mark.skipif(PROMPTS is None, reason="the evaluation prompts are not here")
def test_no_opener_shares_six_words_with_an_evaluation_prompt():
    prompts = set()
    for path in PROMPTS.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            for turn in json.loads(line)["turns"]:
                prompts |= spans(turn, 6)
    assert len(prompts) > 5000
    for group in openers.expand(openers.TEXT.read_text(encoding="utf-8")).values():
        for opener in group:
            assert not spans(opener, 6) & prompts, opener
            assert "complete the code i provided" not in opener.lower()


def test_the_shipped_ids_belong_to_the_text():
    shipped = openers.load()
    expanded = openers.expand(openers.TEXT.read_text(encoding="utf-8"))
    assert {name: len(group) for name, group in shipped["openers"].items()} == {
        name: len(group) for name, group in expanded.items()
    }
    assert sum(shipped["shares"].values()) == pytest.approx(1.0)
    assert shipped["end_id"] in shipped["stop_ids"]


def test_placeholders_are_all_filled():
    for group in openers.expand(openers.TEXT.read_text(encoding="utf-8")).values():
        assert not [opener for opener in group if re.search(r"<[a-z]+>", opener)]
        assert not [opener for opener in group if opener != opener.rstrip(" ")]
