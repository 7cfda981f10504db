"""A conversation rendered with the model's own template; what the template knows of thinking."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree.text.messages import normalise
from ddtree.text.parse import THINK_END, THINK_START, Thought
from ddtree.text.tokenizer import Tokenizer

# Set from the request itself; a template argument of that name would say something else than the request.
OWN_ARGUMENTS = ("messages", "tools", "add_generation_prompt")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    enable_thinking: bool | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt text; encode it with `add_special_tokens=False`, the template writes its own BOS.

    `chat_template_kwargs["enable_thinking"]` wins over `enable_thinking`; None leaves it to the template.
    ValueError names the field: bad messages, no template, or an argument that the template does not know.
    """
    source = tokenizer.chat_template_for(bool(tools))
    if source is None:
        raise ValueError("messages: this model has no chat template; use /v1/completions with a prompt")
    arguments = dict(chat_template_kwargs or {})
    switch, field = enable_thinking, "enable_thinking"
    if arguments.get(field) is not None:
        switch, field = arguments[field], f"chat_template_kwargs.{field}"
    arguments.pop("enable_thinking", None)
    thinking = _switch(switch, field)
    if thinking is not None and knows_thinking(source):
        arguments["enable_thinking"] = thinking
    if tools and not _mentions(source, "tools"):
        raise ValueError("tools: this model's chat template does not read them")
    # Imported here: half of this module's cost, and tests of the rest should not pay it.
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.pretrained.apply_chat_template(
            normalise(messages),
            tools=list(tools) if tools else None,
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **_known(source, arguments),
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"messages: the model's chat template refuses them ({error})") from error
    if thinking is not None and not knows_thinking(source):
        _check_without_switch(thinking, opens_thinking(rendered), field)
    return rendered


def knows_thinking(template: str | None) -> bool:
    """Can thinking be turned on and off in this template?"""
    return template is not None and _mentions(template, "enable_thinking")


def opens_thinking(rendered_prompt: str, start: str = THINK_START) -> bool:
    """Does the prompt end inside an open thought? Only its very end counts: a user may write the tag too."""
    return rendered_prompt.rstrip().endswith(start)


def thought_state(rendered_prompt: str, template: str | None) -> Thought | None:
    """Where the prompt leaves the thought; None if the model writes none, as far as its template tells."""
    if opens_thinking(rendered_prompt):
        return Thought.OPEN
    # A template that takes thoughts out of the history belongs to a model that writes them.
    if template is None or not (knows_thinking(template) or THINK_END in template):
        return None
    return Thought.CLOSED if rendered_prompt.rstrip().endswith(THINK_END) else Thought.UNDECIDED


def _switch(value: Any, field: str) -> bool | None:
    """The switch as the template is to see it; None leaves the template's own default."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{field}: expected true or false, got {value!r}")
    return value


def _check_without_switch(thinking: bool, opens: bool, field: str) -> None:
    """A template without the switch does what it does: ask for that, or be refused."""
    if thinking and not opens:
        raise ValueError(f"{field}: this model's chat template knows no thinking; leave it out or send false")
    if opens and not thinking:
        raise ValueError(f"{field}: this model's chat template always opens a thought; leave it out or send true")


def _known(template: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that the template reads; one that it would ignore is refused, unless it asks for nothing."""
    known = {}
    for name, value in arguments.items():
        if name in OWN_ARGUMENTS:
            raise ValueError(f"chat_template_kwargs.{name}: set by the request itself; leave it out")
        if _mentions(template, name):
            known[name] = value
        elif value:
            raise ValueError(f"chat_template_kwargs.{name}: this model's chat template does not read it")
    return known


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None
