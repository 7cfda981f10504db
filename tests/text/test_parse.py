"""Thought and answer: the same split for pieces of 1, 2, 3 and whole."""

import pytest

from ddtree.text.parse import ReasoningParser
from tests.text.samples import cut

CASES = {
    "opened by the prompt": (True, "\nI think\n\n</think>\n\nAnswer\n", "I think", "Answer\n"),
    "opened by the model": (False, "<think>\nI think\n</think>\n\nAnswer", "I think", "Answer"),
    "opened by both": (True, "<think>\nI think\n</think>\nAnswer", "I think", "Answer"),
    "white space before the tag": (False, " \n<think>a</think>b", "a", "b"),
    "no thought at all": (False, " plain answer\n", "", " plain answer\n"),
    "only white space": (False, " \n ", "", " \n "),
    "empty": (False, "", "", ""),
    "empty thought": (True, "\n\n</think>\n\nAnswer", "", "Answer"),
    "cut in the thought": (True, "\nhalf a tho", "half a tho", ""),
    "cut in the end tag": (True, "thought\n</thi", "thought\n</thi", ""),
    "cut in the start tag": (False, "<thi", "", "<thi"),
    "cut after newlines": (True, "thought\n\n", "thought", ""),
    "false ends inside": (True, "a </thin b\n</ c <think> d</think>e", "a </thin b\n</ c <think> d", "e"),
    "tags quoted in the answer": (True, "a</think>use <think> and </think>", "a", "use <think> and </think>"),
    "tag later in an answer": (False, "say <think>x</think>", "", "say <think>x</think>"),
    "looks like a tag": (False, "<thinker> is a word", "", "<thinker> is a word"),
    "blank lines inside": (True, "one\n\ntwo</think>\nthree\n\nfour", "one\n\ntwo", "three\n\nfour"),
    "leading spaces stay": (True, "  a</think>  b", "  a", "  b"),
    "half open tag": (True, "<thi</think>b", "<thi", "b"),
}


def run(open, parts):
    parser, spans = ReasoningParser(open=open), []
    for part in parts:
        spans += parser.feed(part)
    spans += parser.flush()
    assert all(text for _, text in spans)
    kinds = [kind for kind, _ in spans]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes before content"
    return tuple("".join(text for kind, text in spans if kind == wanted) for wanted in ("reasoning", "content"))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("name", CASES)
def test_split(name, size):
    open, text, reasoning, content = CASES[name]
    assert run(open, cut(text, size)) == (reasoning, content)


def test_other_tags():
    parser = ReasoningParser(start="[THINK]", end="[/THINK]")
    assert parser.feed("[THINK]a[/THINK]b") == [("reasoning", "a"), ("content", "b")]


def test_in_reasoning_follows_the_text():
    parser = ReasoningParser()
    states = []
    for part in ("<think>", "thought", "</think>", "answer"):
        parser.feed(part)
        states.append(parser.in_reasoning)
    assert states == [True, True, False, False]
    assert ReasoningParser(open=True).in_reasoning


def test_an_answer_is_not_held_back():
    parser = ReasoningParser()
    assert parser.feed("A") == [("content", "A")]
    assert parser.feed("\n") == [("content", "\n")]
