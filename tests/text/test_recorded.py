"""Bursts: what the embedded models wrote, token by token, reads the same however it is cut (recorded by
tests/reference/make_recorded_outputs.py)."""

import json
from pathlib import Path

import pytest

from ddtree.text.parse import CONTENT, REASONING, ParserChain, ReasoningParser, Thought
from ddtree.text.tools import CallPart, Tool, ToolFormat, ToolParser
from tests.reference.make_recorded_outputs import TOOLS

FILE = Path(__file__).resolve().parents[1] / "reference" / "recorded_outputs.json"
RECORDED = [
    (f"{model} {number}: {output['asked'][:30]}", output)
    for model, outputs in json.loads(FILE.read_text(encoding="utf-8")).items()
    for number, output in enumerate(outputs)
]


def read(output, pieces):
    """Thought, answer and calls, as the server's parsers understand the pieces."""
    parsers = [] if output["thought"] is None else [ReasoningParser(Thought(output["thought"]))]
    if output["tools"]:
        parsers.append(ToolParser(ToolFormat.HERMES, [Tool(name, TOOLS[name]) for name in output["tools"]]))
    chain, texts, calls = ParserChain(*parsers), {REASONING: "", CONTENT: ""}, []
    for kind, text in [span for piece in pieces for span in chain.feed(piece)] + chain.flush():
        if not isinstance(kind, CallPart):
            texts[kind] += text
        elif kind.part == "name":
            calls.append([text, ""])
        else:
            calls[kind.index][1] += text
    return texts[REASONING], texts[CONTENT], calls


@pytest.mark.parametrize("output", [output for _, output in RECORDED], ids=[name for name, _ in RECORDED])
def test_a_recorded_output_reads_alike_in_every_cut(output):
    text = "".join(output["pieces"])
    whole = read(output, [text])
    assert read(output, output["pieces"]) == whole, "as its tokens came"
    for size in (1, 2, 3, 7):
        assert read(output, [text[i : i + size] for i in range(0, len(text), size)]) == whole, size
    reasoning, content, calls = whole
    if output["thought"] is None and not output["tools"]:
        assert (reasoning, content, calls) == ("", text, [])
    if output["demanded"] and output["finish_reason"] == "stop":
        assert calls and all(set(TOOLS[name]["required"]) <= set(json.loads(arguments)) for name, arguments in calls)
    if "</think>" in text and output["thought"] in ("open", "undecided"):
        assert reasoning and "</think>" not in reasoning


def test_the_recordings_hold_what_they_are_for():
    """Thoughts that end and thoughts that are cut, calls, plain answers; small enough to keep."""
    outputs = [output for _, output in RECORDED]
    found = [read(output, output["pieces"]) for output in outputs]
    assert sum(bool(reasoning and content) for reasoning, content, _ in found) >= 10
    assert sum(bool(reasoning and not content) for reasoning, content, _ in found) >= 1
    assert sum(bool(calls) for _, _, calls in found) >= 10
    assert FILE.stat().st_size < 200_000
