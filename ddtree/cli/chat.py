"""ddtree chat: turns in the terminal, streamed, with what the draft tree gained under each."""

from __future__ import annotations

import argparse

from rich.console import Console

from ddtree.cli.bar import acceptance_bar, shade
from ddtree.cli.ctrl_c import CtrlC, hear_ctrl_c
from ddtree.cli.flags import thinking
from ddtree.cli.loaded import default_budget, find, load
from ddtree.cli.screen import LiveScreen, PlainScreen, screen_of
from ddtree.cli.turns import Turn, summary
from ddtree.text import ParserChain, ReasoningParser, Tokenizer, render_chat, thought_state
from ddtree.text.parse import REASONING, Span

HELP = "/quit ends, /reset forgets the conversation, Ctrl-C stops an answer"


def chat(args: argparse.Namespace) -> int:
    """Talk until /quit or the end of the input."""
    hear_ctrl_c()
    console = Console(highlight=False)
    with console.status(f"loading {args.model}"):
        source, tokenizer = find(args)
        # A switch that the template does not know should not wait for the weights.
        render_chat(tokenizer, [{"role": "user", "content": "hi"}], enable_thinking=thinking(args))
        engine = load(args, source)
        budget = default_budget(args, source, engine, lambda line: None, limit_s=4.0)
    console.print(f"[bold]{source.served_name}[/bold], tree budget {budget.size} ({budget.reason})")
    console.print(HELP, style="dim")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    while (said := _ask(console)) is not None:
        if said == "/reset":
            messages = list(opening)
        elif said:
            with CtrlC() as stopped:
                messages = _answer(console, args, engine, tokenizer, budget.size, messages, said, stopped)
    return 0


def _ask(console: Console) -> str | None:
    """What the user says; None at the end."""
    try:
        said = console.input("[bold cyan]> [/bold cyan]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if said in ("/quit", "/exit") else said


def _answer(
    console, args, engine, tokenizer: Tokenizer, budget: int, messages: list[dict], said: str, stopped: CtrlC
) -> list[dict]:
    """Stream one answer; returns the conversation with it. A turn that fails is left out."""
    asked = [*messages, {"role": "user", "content": said}]
    try:
        rendered = render_chat(tokenizer, asked, enable_thinking=thinking(args))
        token_ids = tokenizer.encode(rendered, add_special_tokens=False)
        turn = Turn(engine, tokenizer, token_ids, args.max_tokens, args.temperature, args.seed, budget, stopped)
        thought = thought_state(rendered, tokenizer.chat_template)
        parser = ParserChain() if thought is None else ReasoningParser(thought)
        most = engine.block_size if budget and engine.block_size else 1
        with screen_of(console) as screen:
            reply = Reply(screen)
            for piece in turn:
                reply.add(parser.feed(piece), shade(turn.num_brought))
                screen.show(acceptance_bar(turn.lengths, most, turn.tokens_per_s(), console.width - 1))
            reply.add(parser.flush())
    except ValueError as error:
        console.print(f"{error}; /reset starts anew", style="red", markup=False)
        return messages
    if turn.stats:
        console.print(summary(turn), style="dim", markup=False, soft_wrap=True)
    else:
        console.print("(stopped)", style="dim", markup=False)
    return [*asked, reply.message()]


class Reply:
    """One answer on a screen: the thought dim, then the answer; and the message that it becomes."""

    def __init__(self, screen: LiveScreen | PlainScreen):
        self._screen = screen
        self._reasoning = self._content = ""

    def add(self, spans: list[Span], style: str = "") -> None:
        """Write and keep what has come; `style` is the answer's."""
        for kind, text in spans:
            if kind == REASONING:
                self._reasoning += text
                self._screen.write(text, "dim")
                continue
            if self._reasoning and not self._content:
                self._screen.write("\n\n")
            self._content += text
            self._screen.write(text, style)

    def message(self) -> dict:
        """For the conversation; the template decides what becomes of the thought."""
        thought = {"reasoning_content": self._reasoning} if self._reasoning else {}
        return {"role": "assistant", "content": self._content, **thought}

