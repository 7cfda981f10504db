"""ddtree audit: is the output lossless, and if not, where does it go wrong; exit status 0 only if all is well."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

from ddtree.cli.flags import add_model, temperature, tree_budget, whole

DEFAULT_MODEL = "smollm2"
THINKING = {None: None, "on": (True,), "off": (False,), "both": (True, False)}


def budgets(text: str) -> tuple[int | str, ...]:
    """An argparse type: `0,16,64,auto`."""
    found = tuple(dict.fromkeys(tree_budget(part.strip()) for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"must be budgets such as 0,16,64, got {text!r}")
    return found


def add_audit(parser: argparse.ArgumentParser) -> None:
    add_model(parser, positional=True)
    # With --url there need be no model; without, it is the usual one.
    parser.set_defaults(model=None)
    parser.add_argument(
        "--url", help="audit a running server from outside; MODEL, if given, is compared with it; its key is read from DDTREE_API_KEY"
    )
    parser.add_argument(
        "--budgets", type=budgets, metavar="LIST", help="tree budgets, auto among them (default: 0,16,32,64,128,256,512,1024)"
    )
    parser.add_argument("--max-tokens", type=whole(2), default=64, metavar="N", help="per answer (default: 64)")
    parser.add_argument("--limit", type=whole(1), metavar="N", help="use the first N prompts")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines with id and turns (default: built-in)")
    parser.add_argument(
        "--temperature", type=temperature, action="append", metavar="T", help="repeatable (default: 0; 0 is greedy)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for temperatures above 0 (default: 0)")
    parser.add_argument(
        "--thinking", choices=("on", "off", "both"), help="where the template knows it (default: on and off in turn, by prompt)"
    )
    parser.add_argument(
        "--reference", action=argparse.BooleanOptionalAction, help="compare with transformers (default: for small models)"
    )
    parser.add_argument("--fidelity", action="store_true", help="also judge the drafter against its card and reference")
    parser.add_argument("--no-inspect", action="store_true", help="look inside rounds only where outputs differ")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a report with the trees drawn")
    parser.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="write one JSON line per inspected round")


def audit(args: argparse.Namespace) -> int:
    """Run it; 0 for identical and near ties without a fault, 1 for a mismatch, 3 for a faulty drafter alone."""
    from ddtree.audit.fidelity import check_fidelity
    from ddtree.audit.lossless import Audit
    from ddtree.audit.prompts import encode_all, read_prompts
    from ddtree.cli.loaded import card_of, find, load, start

    texts = read_prompts(args.prompts)[: args.limit]
    if args.url:
        return _served(args, texts)
    args.model = args.model or DEFAULT_MODEL
    source, tokenizer = find(args)
    engine = load(args, source)
    if "auto" in (args.budgets or ()):
        start(source, engine, _say)
    reference, reason = _reference(args, source, engine, tokenizer)
    prompts = encode_all(tokenizer, texts, *_served_forms(engine.vocab_size), THINKING[args.thinking])
    run = Audit(engine, tokenizer, _plan(args), reference, say=_say)
    run.result.reference = "transformers" if reference is not None else None
    if reason:
        run.result.notes.append(reason)
    result = run.run(prompts)
    if args.fidelity:
        check_fidelity(run, reference, card_of(source.drafter), prompts)
    if source.drafter is None:
        result.notes.append(f"no drafter of its own: {source.drafter_reason}; trees came from the audit's scripted drafters")
    _write_files(args, run, source, tokenizer)
    _show(result, source.served_name)
    print(json.dumps(result.as_json()))
    return result.exit_status


def _plan(args: argparse.Namespace):
    from ddtree.audit.plan import DEFAULT_BUDGETS, Plan

    return Plan(
        budgets=args.budgets or DEFAULT_BUDGETS,
        max_tokens=args.max_tokens,
        temperatures=tuple(args.temperature or (0.0,)),
        seed=args.seed,
        inspect=not args.no_inspect,
    )


def _served(args: argparse.Namespace, texts) -> int:
    """A server by its URL, beside a model of one's own where one is named."""
    from ddtree.client import ServerClient

    with closing(ServerClient(args.url, os.environ.get("DDTREE_API_KEY"))) as client:
        client.model()  # before a model is loaded in vain
        return _audit_served(args, texts, client)


def _audit_served(args: argparse.Namespace, texts, client) -> int:
    from ddtree.audit.fidelity import acceptance_faults
    from ddtree.audit.served import ServedAudit
    from ddtree.audit.served_local import Local
    from ddtree.cli.loaded import card_of, find, load

    local = tokenizer = card = None
    if args.model:
        source, tokenizer = find(args)
        engine, card = load(args, source), card_of(source.drafter)
        reference = _reference(args, source, engine, tokenizer)[0] if args.reference else None
        local = Local(engine, tokenizer, *_served_forms(engine.vocab_size), args.max_tokens, reference)
    run = ServedAudit(client, _plan(args), tokenizer, local, _say)
    result = run.run(texts, THINKING[args.thinking])
    if args.fidelity:
        at_zero = (card or {}).get("0") if run.plan.temperatures == (0.0,) else None
        acceptance_faults(run.lengths, at_zero, result)
    if args.report or args.trace:
        result.notes.append("--report and --trace have no effect with --url: there are no trees to draw from outside")
    _show(result, args.url)
    print(json.dumps(result.as_json()))
    return result.exit_status


def _say(line: str) -> None:
    print(f"audit: {line}", file=sys.stderr, flush=True)


def _served_forms(vocab_size: int):
    """Chat and raw prompts as the server turns them into ids, so that its own route is what is audited."""
    from ddtree.server.prepare import completion_prompts
    from ddtree.server.text import Text

    # Not the server's own models of a request: an audit runs where there is neither pydantic nor FastAPI.
    def chat(tokenizer, text: str, thinking: bool | None):
        messages = [{"role": "user", "content": text}]
        body = SimpleNamespace(messages=messages, enable_thinking=thinking, chat_template_kwargs=None, tools_told=[])
        return Text(tokenizer).chat(body).token_ids

    def raw(tokenizer, text: str):
        return completion_prompts(SimpleNamespace(prompt=text), Text(tokenizer), vocab_size)[0].token_ids

    return chat, raw


def _reference(args, source, engine, tokenizer):
    """transformers beside it where it is asked for, or is a small matter; else why not."""
    from ddtree.audit.reference import Reference, fits

    if args.reference is False or (args.reference is None and not fits(source.target)):
        return None, "no comparison with transformers: " + ("--no-reference" if args.reference is False else "a large model")
    model = engine.target.model
    try:
        return Reference.load(source.target, engine.target.device, model.embed_tokens.dtype, tokenizer.eos_token_ids), None
    except ValueError as error:
        if args.reference:
            raise
        return None, f"no comparison with transformers: {error}"


def _write_files(args, run, source, tokenizer) -> None:
    from ddtree.audit.render import render
    from ddtree.audit.trace import trace_lines

    def text_of(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    if args.report:
        title = f"ddtree audit {source.served_name}"
        args.report.write_text(render(run.result, run.inside.inspections, text_of, title), encoding="utf-8")
    if args.trace:
        args.trace.write_text("".join(f"{line}\n" for line in trace_lines(run.inside.inspections, text_of)), encoding="utf-8")


def _show(result, name: str) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=f"audit of {escape(name)}")
    for name in ("prompt", "against", "position", "plain", "other", "margin", "verdict"):
        table.add_column(name)
    for each in result.divergences:
        margin = "" if each.margin is None else f"{each.margin:.2g}"
        cells = (f"{each.prompt_id} ({each.form}{_switch(each.thinking)})", each.against, str(each.position), each.plain_token, each.other_token)
        table.add_row(*map(escape, cells), margin, each.verdict)
    if result.divergences:
        console.print(table)
    console.print(
        f"{result.verdict.replace('_', ' ')}, drafter {result.drafter.replace('_', ' ')}: {result.prompts} prompts, {result.runs} runs, "
        f"{result.packed} of them side by side, {result.tokens} plain tokens, {result.rounds_inspected} rounds inspected",
        soft_wrap=True,
    )
    for fault in result.faults:
        console.print(f"FAULT ({fault.kind}) {escape(fault.where)}", soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    for what in result.unchecked:
        console.print(f"not checked: {escape(what)}", soft_wrap=True)


def _switch(thinking: bool | None) -> str:
    return "" if thinking is None else f", thinking {'on' if thinking else 'off'}"
