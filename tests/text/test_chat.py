"""Messages as clients send them, rendered as the model's template wants them."""

import pytest

from ddtree.text.chat import knows_thinking, opens_thinking, render_chat, thought_state
from ddtree.text.parse import Thought
from tests.text.conftest import CHATML, THINKING

HI = [{"role": "user", "content": "hi"}]


def test_renders_the_models_own_template(chat_tokenizer):
    assert render_chat(chat_tokenizer, HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(chat_tokenizer, HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_smollm2_counts_equal_transformers(smollm2):
    for messages in (HI, [{"role": "system", "content": "Be brief 🙂."}, *HI], [*HI, {"role": "assistant", "content": "a"}]):
        ids = smollm2.encode(render_chat(smollm2, messages), add_special_tokens=False)
        own = smollm2.pretrained.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == own


@pytest.mark.parametrize(
    "content, text",
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}, "c"], "a bc"),
    ],
)
def test_contents(chat_tokenizer, content, text):
    rendered = render_chat(chat_tokenizer, [{"role": "user", "content": content}], add_generation_prompt=False)
    assert rendered == f"<|im_start|>user\n{text}<|im_end|>\n"


def test_system_messages_merge_and_lead(chat_tokenizer):
    messages = [
        {"role": "system", "content": "one"},
        *HI,
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
    ]
    rendered = render_chat(chat_tokenizer, messages, add_generation_prompt=False)
    assert rendered == "<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], "messages: must not be empty"),
        ([{"role": "wizard", "content": "a"}], r"messages\[0\].role: must be one of .* got .wizard"),
        ([{"content": "a"}], r"messages\[0\].role: must be one of .* got null"),
        (["hi"], r"messages\[0\]: must be an object with role and content, got .hi"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: must be a string"),
        ([*HI, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"messages\[1\].content\[0\].type: .image_url"),
        ([{"role": "assistant", "reasoning_content": ["a"]}], r"messages\[0\].reasoning_content: must be a string or null, got"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text: must be a string, got null"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "arguments are not JSON"),
    ],
)
def test_refused_messages_are_named(chat_tokenizer, messages, words):
    with pytest.raises(ValueError, match=words):
        render_chat(chat_tokenizer, messages)


def test_no_template_is_an_error(byte_tokenizer):
    with pytest.raises(ValueError, match="use /v1/completions"):
        render_chat(byte_tokenizer, HI)


def test_a_template_that_refuses_is_an_error(chat_tokenizer):
    chat_tokenizer.pretrained.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        render_chat(chat_tokenizer, HI)


@pytest.mark.parametrize("off", [False, "false", "False"])
def test_thinking_off(thinking_tokenizer, off):
    for options in ({"enable_thinking": off}, {"chat_template_kwargs": {"enable_thinking": off}}):
        rendered = render_chat(thinking_tokenizer, HI, **options)
        assert rendered.endswith("<think>\n\n</think>\n\n")
        assert not opens_thinking(rendered)


@pytest.mark.parametrize("on", [None, True, "true"])
def test_thinking_on(thinking_tokenizer, on):
    assert opens_thinking(render_chat(thinking_tokenizer, HI, enable_thinking=on))


def test_the_inner_switch_wins(thinking_tokenizer):
    inner = {"enable_thinking": "true"}
    assert opens_thinking(render_chat(thinking_tokenizer, HI, enable_thinking=False, chat_template_kwargs=inner))


def test_a_template_without_thinking(chat_tokenizer):
    assert render_chat(chat_tokenizer, HI, enable_thinking="false") == render_chat(chat_tokenizer, HI)
    with pytest.raises(ValueError, match="knows no thinking"):
        render_chat(chat_tokenizer, HI, enable_thinking=True)
    with pytest.raises(ValueError, match="expected true or false, got 'maybe'"):
        render_chat(chat_tokenizer, HI, enable_thinking="maybe")


def test_the_switch_is_named_where_it_stood(thinking_tokenizer):
    with pytest.raises(ValueError, match=r"^chat_template_kwargs.enable_thinking: expected true or false, got 1"):
        render_chat(thinking_tokenizer, HI, enable_thinking=True, chat_template_kwargs={"enable_thinking": 1})


def test_a_template_that_always_thinks(chat_tokenizer):
    """As the models that only think have it: an opener, no switch. What it does anyway may be asked for."""
    chat_tokenizer.pretrained.chat_template = CHATML.replace("assistant\n", "assistant\n<think>\n")
    assert opens_thinking(render_chat(chat_tokenizer, HI, enable_thinking=True))
    with pytest.raises(ValueError, match="^enable_thinking: .* always opens a thought"):
        render_chat(chat_tokenizer, HI, enable_thinking="false")


def test_template_arguments_are_used_or_refused(chat_tokenizer):
    with pytest.raises(ValueError, match="chat_template_kwargs.style: .* does not read it"):
        render_chat(chat_tokenizer, HI, chat_template_kwargs={"style": "terse"})
    with pytest.raises(ValueError, match="chat_template_kwargs.messages: set by the request"):
        render_chat(chat_tokenizer, HI, chat_template_kwargs={"messages": []})
    chat_tokenizer.pretrained.chat_template = CHATML + "{{ style }}"
    assert render_chat(chat_tokenizer, HI, chat_template_kwargs={"style": "terse"}).endswith("terse")


def test_tools_are_rendered_or_refused(chat_tokenizer):
    tools = [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(ValueError, match="tools: .* does not read them"):
        render_chat(chat_tokenizer, HI, tools=tools)
    named = CHATML + "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    chat_tokenizer.pretrained.chat_template = {"default": CHATML, "tool_use": named}
    assert render_chat(chat_tokenizer, HI, tools=tools).endswith("look")


def test_tool_call_arguments_become_objects(chat_tokenizer):
    chat_tokenizer.pretrained.chat_template = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Bern"}'}}
    assert render_chat(chat_tokenizer, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Bern"
    assert call["function"]["arguments"] == '{"city": "Bern"}'


def test_detection():
    assert knows_thinking(THINKING)
    assert not knows_thinking(CHATML)
    assert not knows_thinking(None)
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("what does <think> mean?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("end", "template", "state"),
    [
        ("assistant\n<think>\n", CHATML, Thought.OPEN),
        ("assistant\n<think>\n\n</think>\n\n", THINKING, Thought.CLOSED),
        ("assistant\n", THINKING, Thought.UNDECIDED),
        ("assistant\n", "{{ m.content.split('</think>')[-1] }}", Thought.UNDECIDED),
        ("assistant\n", CHATML, None),
        ("assistant\n", None, None),
    ],
)
def test_the_prompt_says_where_the_thought_stands(end, template, state):
    assert thought_state("<|im_start|>user\n</think> or <think>?<|im_end|>\n<|im_start|>" + end, template) is state
