"""ddtree generate: one prompt, the answer on standard output."""

from __future__ import annotations

import argparse
import sys

from ddtree.cli.flags import thinking
from ddtree.cli.loaded import default_budget, find, load
from ddtree.cli.turns import Turn, summary
from ddtree.text import Tokenizer, render_chat


def generate(args: argparse.Namespace) -> int:
    """Print the answer as it comes."""
    source, tokenizer = find(args)
    prompt_token_ids = prompt_of(args, tokenizer)
    engine = load(args, source)
    budget = default_budget(args, source, engine, lambda line: None, limit_s=2.0)
    turn = Turn(engine, tokenizer, prompt_token_ids, args.max_tokens, args.temperature, args.seed, budget.size)
    for piece in turn:
        print(piece, end="", flush=True)
    print()
    if args.stats:
        print(summary(turn), file=sys.stderr)
    return 0


def prompt_of(args: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    """As a chat where the model has a template, unless --raw."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.raw or not (args.chat or tokenizer.chat_template):
        if args.thinking is not None:
            raise ValueError(f"--thinking {args.thinking}: a raw prompt has no chat template; leave it out")
        token_ids = tokenizer.encode(text)
        if not token_ids:
            raise ValueError(f"the prompt has no tokens, got {text!r}: give some text")
        return token_ids
    rendered = render_chat(tokenizer, [{"role": "user", "content": text}], enable_thinking=thinking(args))
    return tokenizer.encode(rendered, add_special_tokens=False)
