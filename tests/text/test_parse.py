"""Thought and answer: the same split for pieces of 1, 2, 3 and whole."""

import pytest

from ddtree.text.parse import CONTENT, REASONING, ParserChain, ReasoningParser, Thought
from tests.text.samples import cut

CASES = {
    "opened by the prompt": (Thought.OPEN, "\nI think\n\n</think>\n\nAnswer\n", "I think", "Answer\n"),
    "opened by the model": (Thought.UNDECIDED, "<think>\nI think\n</think>\n\nAnswer", "I think", "Answer"),
    "opened by both": (Thought.OPEN, "<think>\nI think\n</think>\nAnswer", "I think", "Answer"),
    "white space before the tag": (Thought.UNDECIDED, " \n<think>a</think>b", "a", "b"),
    "no thought at all": (Thought.UNDECIDED, " plain answer\n", "", " plain answer\n"),
    "only white space": (Thought.UNDECIDED, " \n ", "", " \n "),
    "empty": (Thought.UNDECIDED, "", "", ""),
    "empty thought": (Thought.OPEN, "\n\n</think>\n\nAnswer", "", "Answer"),
    "cut in the thought": (Thought.OPEN, "\nhalf a tho", "half a tho", ""),
    "cut in the end tag": (Thought.OPEN, "thought\n</thi", "thought\n</thi", ""),
    "cut in the start tag": (Thought.UNDECIDED, "<thi", "", "<thi"),
    "cut after newlines": (Thought.OPEN, "thought\n\n", "thought", ""),
    "false ends inside": (Thought.OPEN, "a </thin b\n</ c <think> d</think>e", "a </thin b\n</ c <think> d", "e"),
    "tags quoted in the answer": (Thought.OPEN, "a</think>use <think> and </think>", "a", "use <think> and </think>"),
    "tag later in an answer": (Thought.UNDECIDED, "say <think>x</think>", "", "say <think>x</think>"),
    "looks like a tag": (Thought.UNDECIDED, "<thinker> is a word", "", "<thinker> is a word"),
    "blank lines inside": (Thought.OPEN, "one\n\ntwo</think>\nthree\n\nfour", "one\n\ntwo", "three\n\nfour"),
    "leading spaces stay": (Thought.OPEN, "  a</think>  b", "  a", "  b"),
    "half open tag": (Thought.OPEN, "<thi</think>b", "<thi", "b"),
    "closed by the prompt": (Thought.CLOSED, "\n<think>a</think>\nb", "", "\n<think>a</think>\nb"),
    "an end tag alone": (Thought.UNDECIDED, "a</think>b", "", "a</think>b"),
    "a thought without an answer": (Thought.UNDECIDED, "<think>\na\n</think>\n\n", "a", ""),
    "wide characters": (Thought.OPEN, "é🙂\n</think>\n\n你好", "é🙂", "你好"),
}


def run(thought, parts):
    parser, spans = ReasoningParser(thought), []
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
    thought, text, reasoning, content = CASES[name]
    assert run(thought, cut(text, size)) == (reasoning, content)


def test_other_tags():
    parser = ReasoningParser(start="[THINK]", end="[/THINK]")
    assert parser.feed("[THINK]a[/THINK]b") == [("reasoning", "a"), ("content", "b")]


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("thought", "text", "inside"),
    [
        (Thought.OPEN, "\nwhy\n</think>\n\nyes", "\nwhy\n</think>"),
        (Thought.UNDECIDED, " \n<think>why</think>yes", "<think>why</think>"),
        (Thought.UNDECIDED, "<think>why not", "<think>why not"),
        (Thought.UNDECIDED, "yes", None),
        (Thought.CLOSED, "<think>why</think>yes", None),
    ],
)
def test_the_place_of_the_thought(thought, text, inside, size):
    parser = ReasoningParser(thought)
    for part in cut(text, size):
        parser.feed(part)
    found = None if parser.thought_start is None else text[parser.thought_start : parser.thought_end]
    assert found == inside


class Shouts:
    """A parser of something else: words between exclamation marks, held back until they close."""

    def __init__(self):
        self.held = ""

    def feed(self, text):
        self.held += text
        before, mark, after = self.held.partition("!")
        word, end, rest = after.partition("!")
        if mark and not end:
            self.held = mark + after
            return [(CONTENT, before)] if before else []
        self.held = ""
        spans = [(CONTENT, before), ("shout", word)]
        return [span for span in spans if span[1]] + (self.feed(rest) if mark else [])

    def flush(self):
        return [(CONTENT, self.held)] if self.held else []


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_second_parser_reads_the_answer_only(size):
    text = "<think>no !shout! here</think>\n\nbut !one! here and !half"
    chain, spans = ParserChain(ReasoningParser(), Shouts()), []
    for part in cut(text, size):
        spans += chain.feed(part)
    spans += chain.flush()
    joined = {kind: "".join(t for k, t in spans if k == kind) for kind in (REASONING, CONTENT, "shout")}
    assert joined == {REASONING: "no !shout! here", CONTENT: "but  here and !half", "shout": "one"}


def test_what_one_parser_held_back_the_next_still_reads():
    chain = ParserChain(ReasoningParser(start="!a!>"), Shouts())
    assert chain.feed("!a!") == []
    assert chain.flush() == [("shout", "a")]


def test_a_chain_of_none_is_content():
    assert ParserChain().feed("<think>") == [(CONTENT, "<think>")]
    assert ParserChain().feed("") == ParserChain().flush() == []


def test_an_answer_is_not_held_back():
    parser = ReasoningParser()
    assert parser.feed("A") == [("content", "A")]
    assert parser.feed("\n") == [("content", "\n")]
