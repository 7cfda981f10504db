"""ddtree chat: turns in the terminal, streamed, with what the draft tree gained under each."""

from __future__ import annotations

import argparse

from rich.console import Console

from ddtree.cli.flags import thinking
from ddtree.cli.loaded import default_budget, find, load
from ddtree.cli.turns import Turn, summary
from ddtree.text import ParserChain, ReasoningParser, Tokenizer, render_chat, thought_state
from ddtree.text.parse import REASONING, Span

# The answer by how many tokens its round brought, for light and dark terminals alike.
SHADES = ((8, "bold green underline"), (5, "bold green"), (3, "green"), (2, "cyan"), (0, ""))
HELP = "/quit ends, /reset forgets the conversation, Ctrl-C stops an answer"


def chat(args: argparse.Namespace) -> int:
    """Talk until /quit or the end of the input."""
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
            messages = _answer(console, args, engine, tokenizer, budget.size, messages, said)
    return 0


def _ask(console: Console) -> str | None:
    """What the user says; None at the end."""
    try:
        said = console.input("[bold cyan]> [/bold cyan]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if said in ("/quit", "/exit") else said


def _answer(console, args, engine, tokenizer: Tokenizer, budget: int, messages: list[dict], said: str) -> list[dict]:
    """Stream one answer; returns the conversation with it. A turn that fails is left out."""
    asked = [*messages, {"role": "user", "content": said}]
    try:
        rendered = render_chat(tokenizer, asked, enable_thinking=thinking(args))
        token_ids = tokenizer.encode(rendered, add_special_tokens=False)
        turn = Turn(engine, tokenizer, token_ids, args.max_tokens, args.temperature, args.seed, budget)
        thought = thought_state(rendered, tokenizer.chat_template)
        parser = ParserChain() if thought is None else ReasoningParser(thought)
        reply = Reply(console)
        for piece in _until_interrupted(turn):
            reply.add(parser.feed(piece), shade(turn.num_brought))
        reply.add(parser.flush())
    except ValueError as error:
        console.print(f"{error}; /reset starts anew", style="red", markup=False)
        return messages
    console.print()
    if turn.stats:
        console.print(summary(turn), style="dim", markup=False)
    else:
        console.print("(stopped)", style="dim", markup=False)
    return [*asked, reply.message()]


class Reply:
    """One answer on the terminal: the thought dim, then the answer; and the message that it becomes."""

    def __init__(self, console: Console):
        self._console = console
        self._reasoning = self._content = ""

    def add(self, spans: list[Span], style: str = "") -> None:
        """Print and keep what has come; `style` is the answer's."""
        for kind, text in spans:
            if kind == REASONING:
                self._reasoning += text
                self._console.print(text, end="", style="dim", markup=False, soft_wrap=True)
                continue
            if self._reasoning and not self._content:
                self._console.print("\n")
            self._content += text
            self._console.print(text, end="", style=style, markup=False, soft_wrap=True)

    def message(self) -> dict:
        """For the conversation; the template decides what becomes of the thought."""
        thought = {"reasoning_content": self._reasoning} if self._reasoning else {}
        return {"role": "assistant", "content": self._content, **thought}


def shade(num_tokens: int) -> str:
    """The style of text that so many tokens came with."""
    return next(style for least, style in SHADES if num_tokens >= least)


def _until_interrupted(turn: Turn):
    pieces = iter(turn)
    try:
        yield from pieces
    except KeyboardInterrupt:
        pieces.close()
