"""Tool calls are read alike however the text is cut, in both families' forms; what is no call stays text."""

import json

import pytest

from ddtree.text.parse import CONTENT, ParserChain, ReasoningParser, Thought
from ddtree.text.tool_prompt import spell_out
from ddtree.text.tools import CallPart, Tool, ToolFormat, ToolParser, tool_format

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "free": {},
    },
    "required": ["city"],
}
TOOLS = (Tool("get_weather", WEATHER), Tool("now", {}))
SIZES = [1, 2, 3, 5, None]
HERMES_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich \\"old}\\" </tool", "days": 3}}\n</tool_call>'
)
XML_CALL = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n\nline "two" </par\n</parameter>\n'
    '<parameter=days>\n3\n</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>'
)


def read(format, text, size, parsers=()):
    parser = ParserChain(*parsers, ToolParser(format, TOOLS))
    pieces = [text] if size is None else [text[i : i + size] for i in range(0, len(text), size)]
    spans = [span for piece in pieces for span in parser.feed(piece)] + parser.flush()
    content, calls, other = "", [], {}
    for kind, piece in spans:
        assert piece
        if kind == CONTENT:
            content += piece
        elif isinstance(kind, CallPart):
            if kind.part == "name":
                assert kind.index == len(calls)
                calls.append([piece, ""])
            else:
                calls[kind.index][1] += piece
        else:
            other[kind] = other.get(kind, "") + piece
    return content, calls, other


HERMES_CASES = {
    "text, two calls": (
        f"I will look.\n\n{HERMES_CALL}\n{HERMES_CALL}\n",
        "I will look.",
        [("get_weather", {"city": 'Zürich "old}" </tool', "days": 3})] * 2,
    ),
    "arguments first": (
        '<tool_call>{"arguments":{"a":[{"b":"}"}]},"name":"f"}</tool_call>',
        "",
        [("f", {"a": [{"b": "}"}]})],
    ),
    "as a string": ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": null}}</tool_call>', "", [("f", {"a": None})]),
    "none given": ('<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", {})]),
    "other fields": ('<tool_call>{"id": 5, "name": "f", "x": [1], "arguments": {}}</tool_call>', "", [("f", {})]),
    "no JSON": ("see <tool_call>this</tool_call> tag", "see <tool_call>this</tool_call> tag", []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "lookalikes": ("a <tool b <tool_cal", "a <tool b <tool_cal", []),
    "never closed": ('x <tool_call>{"name": "f", "arguments": {"a": 1}}', "x", [("f", {"a": 1})]),
    "spaces kept": ("  a \n b\n", "  a \n b\n", []),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("text", "content", "calls"), HERMES_CASES.values(), ids=HERMES_CASES)
def test_hermes(text, content, calls, size):
    found, named, _ = read(ToolFormat.HERMES, text, size)
    assert found == content
    assert [(name, json.loads(arguments)) for name, arguments in named] == calls


XML_CASES = {
    "text, two calls": (
        f"I will look.\n\n{XML_CALL}\n{XML_CALL}",
        "I will look.",
        [("get_weather", {"city": 'Zürich\n\nline "two" </par', "days": 3, "tags": ["a", "b"]})] * 2,
    ),
    "no parameters": ("<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    "unknown function": (
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b>x y</parameter></function></tool_call>",
        "",
        [("f", {"a": 1, "b": "x y"})],
    ),
    "Python's constants": (
        "<tool_call>\n<function=get_weather>\n<parameter=free>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get_weather", {"free": True})],
    ),
    "empty string": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get_weather", {"city": ""})],
    ),
    "end tags forgotten": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRom\n</tool_call>",
        "",
        [("get_weather", {"city": "Rom"})],
    ),
    "no function": ("<tool_call>hm</tool_call>", "<tool_call>hm</tool_call>", []),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("text", "content", "calls"), XML_CASES.values(), ids=XML_CASES)
def test_xml(text, content, calls, size):
    found, named, _ = read(ToolFormat.XML, text, size)
    assert found == content
    assert [(name, json.loads(arguments)) for name, arguments in named] == calls


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("format", "call"), [(ToolFormat.HERMES, HERMES_CALL), (ToolFormat.XML, XML_CALL)])
def test_behind_a_thought_that_mentions_a_call(format, call, size):
    thought = f"perhaps {call}?"
    content, calls, other = read(format, f"{thought}</think>\n\n{call}", size, [ReasoningParser(Thought.OPEN)])
    assert other == {"reasoning": thought} and content == "" and len(calls) == 1


def test_arguments_stream_before_the_call_ends():
    parser = ToolParser(ToolFormat.XML, TOOLS)
    spans = parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nA long val")
    assert spans == [(CallPart(0, "name"), "get_weather"), (CallPart(0, "arguments"), '{"city": "A long val')]
    parser = ToolParser(ToolFormat.HERMES, TOOLS)
    spans = parser.feed('<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert spans == [(CallPart(0, "name"), "f"), (CallPart(0, "arguments"), '{"a": "lo')]


def test_format_is_read_from_the_template():
    assert tool_format("… <tool_call>\n{} …") is ToolFormat.HERMES
    assert tool_format("… <tool_call>\n<function=x> …") is ToolFormat.XML
    assert tool_format("plain") is None and tool_format(None) is None


def test_tools_are_spelled_out_where_the_template_has_no_place():
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    told = spell_out(messages, [tool])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert json.dumps(tool) in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert told[3]["content"] == "<tool_response>\ndone\n</tool_response>"
    # What the model reads of its calls is what the parser reads of its answers.
    assert read(ToolFormat.HERMES, told[2]["content"], None)[1] == [["f", '{"a": "é"}']]
