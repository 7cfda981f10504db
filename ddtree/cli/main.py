"""ddtree: serve, generate, chat, fetch, bench, audit, trace, systemd, doctor, train. Each command imports its room when called, so that --help is instant."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import sys
from collections.abc import Callable, Sequence

from ddtree import __version__
from ddtree.cli.bench import add_bench
from ddtree.cli.ctrl_c import lost_none
from ddtree.cli.flags import add_model, add_sampling, add_thinking
from ddtree.cli.serve_flags import add_serve

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Faults of the user's are one line and status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # The interpreter's last collection walks all of torch's objects, for seconds, though the process ends anyway.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    if argv[:1] == ["train"]:
        return _guarded(lambda: _train(argv[1:]))
    # What follows "--" is for the command that `ddtree systemd` writes down.
    end = argv.index("--") if argv[:1] == ["systemd"] and "--" in argv else len(argv)
    args = build_parser().parse_args(argv[:end])
    args.argv, args.rest = argv, argv[end + 1 :]
    if args.command is None:
        build_parser().print_help()
        return 2
    return _guarded(lambda: args.run(args))


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(
        prog="ddtree", description="Serve language models faster without changing what they say."
    )
    parser.add_argument("--version", action="version", version=f"ddtree {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a model over the OpenAI API"))
    _add_generate(commands.add_parser("generate", help="answer one prompt"))
    _add_chat(commands.add_parser("chat", help="talk to a model in the terminal"))
    _add_fetch(commands.add_parser("fetch", help="download an embedded model into the cache"))
    add_bench(commands.add_parser("bench", help="measure tokens per second, plain and with trees"))
    commands.add_parser("train", help="train a drafter (see ddtree train --help)", add_help=False)
    _add_audit(commands.add_parser("audit", help="prove the output lossless, token by token, or say where it is not"))
    _add_trace(commands.add_parser("trace", help="draw a saved trace, round by round, as an HTML page"))
    _add_systemd(commands.add_parser("systemd", help="print or install the systemd unit that serves"))
    _add_doctor(commands.add_parser("doctor", help="check the machine, the model and the drafter, and say what to do"))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_serve(parser)
    parser.set_defaults(run=_serve)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help='the prompt, "-" reads it from standard input')
    add_model(parser, positional=False)
    add_sampling(parser, max_tokens=256)
    add_thinking(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    form.add_argument("--chat", action="store_true", help="answer as a chat (default where the model has a template)")
    parser.add_argument("--stats", action="store_true", help="print acceptance and speed to standard error")
    parser.set_defaults(run=_generate)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    add_model(parser, positional=True)
    add_sampling(parser, max_tokens=512)
    add_thinking(parser)
    parser.add_argument("--system", help="a system message")
    parser.set_defaults(run=_chat)


def _add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="an embedded name, such as smollm2")
    parser.set_defaults(run=_fetch)


def _add_audit(parser: argparse.ArgumentParser) -> None:
    from ddtree.cli.audit import add_audit

    add_audit(parser)
    parser.set_defaults(run=_audit)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    from ddtree.cli.trace import add_trace

    add_trace(parser)
    parser.set_defaults(run=_trace)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    from ddtree.cli.doctor import add_doctor

    add_doctor(parser)
    parser.set_defaults(run=_doctor)


def _add_systemd(parser: argparse.ArgumentParser) -> None:
    from ddtree.cli.systemd import add_systemd

    add_systemd(parser)
    parser.set_defaults(run=_systemd)


def _guarded(run: Callable[[], int]) -> int:
    try:
        with lost_none():
            return run()
    except (ValueError, OSError) as error:
        # SourceError and what loading finds wrong are ValueErrors that name both sides and the remedy.
        print(f"ddtree: error: {error}", file=sys.stderr)
        logging.getLogger("ddtree").debug("traceback", exc_info=error)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def _serve(args: argparse.Namespace) -> int:
    from ddtree.cli.settled import serve

    return serve(args.argv[1:])


def _generate(args: argparse.Namespace) -> int:
    from ddtree.cli.generate import generate

    return generate(args)


def _chat(args: argparse.Namespace) -> int:
    from ddtree.cli.chat import chat

    return chat(args)


def _fetch(args: argparse.Namespace) -> int:
    from ddtree.sources import fetch
    from ddtree.text import Tokenizer

    path = fetch(args.name)
    Tokenizer.load(path)  # converts a GGUF's tokenizer once, so that the first serve need not
    print(path)
    return 0


def _audit(args: argparse.Namespace) -> int:
    from ddtree.cli.audit import audit

    return audit(args)


def _trace(args: argparse.Namespace) -> int:
    from ddtree.cli.trace import trace

    return trace(args)


def _doctor(args: argparse.Namespace) -> int:
    from ddtree.cli.doctor import doctor

    return doctor(args)


def _systemd(args: argparse.Namespace) -> int:
    from ddtree.cli.systemd import systemd

    return systemd(args)


def _train(argv: list[str]) -> int:
    from ddtree.training.command import main as train

    return train(argv) or 0
