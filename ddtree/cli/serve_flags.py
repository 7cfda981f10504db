"""The flags of ddtree serve."""

from __future__ import annotations

import argparse

from ddtree.cli.flags import add_model, whole


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The model, where to listen, who may call, how many replicas."""
    add_model(parser, positional=True)
    parser.add_argument(
        "--engine", choices=("ddtree", "sglang"), default="ddtree", help="sglang: its server and ranks, our trees (default: ddtree)"
    )
    parser.add_argument("--engine-args", metavar="FLAGS", help="with --engine sglang, more flags of its own: '--tp-size 2'")
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=whole(0, 65535), default=8000, help="0 picks a free one (default: 8000)")
    parser.add_argument("--uds", metavar="PATH", help="listen on a Unix socket of this path, not on --host and --port")
    parser.add_argument(
        "--served-model-name", action="append", default=[], metavar="NAME", help="another name for the model; repeatable"
    )
    parser.add_argument("--config", metavar="FILE", help="settings in TOML or YAML, by the names of these flags, which win")
    parser.add_argument("--api-key", help="demand this key (default: none; DDTREE_API_KEY keeps it off the process list)")
    parser.add_argument("--api-key-file", metavar="FILE", help="accept the keys in this file, one a line")
    parser.add_argument(
        "--max-body", type=whole(1, 1024), default=16, metavar="MIB", help="largest request read (default: 16 MiB)"
    )
    parser.add_argument(
        "--replicas", type=whole(1), metavar="N", help="engine processes behind one address (default: 1, or one per --gpus)"
    )
    parser.add_argument(
        "--gpus", type=gpu_list, metavar="0,1,…", help="one replica on each of these GPUs (default: the first --replicas)"
    )
    parser.add_argument("--no-ui", action="store_true", help="serve no chat page at /")
    parser.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help='let scripts of this web origin call (repeatable; default: "*", all of them; "" for none)',
    )
    parser.add_argument("--max-waiting", type=whole(1), default=128, metavar="N", help="queue limit (default: 128)")
    parser.add_argument("--max-running", type=whole(1), default=8, metavar="N", help="requests decoded side by side (default: 8)")
    parser.add_argument(
        "--max-stall", type=whole(0), default=250, metavar="MS",
        help="that prefill may hold up those that decode; 0: whole chunks, of 512 tokens, on a GPU 2,048 (default: 250)",
    )
    parser.add_argument(
        "--cache-memory",
        type=gibibytes,
        metavar="GIB",
        help="for all requests' caches (default: half of what is free; on a GPU what may run and as much again, if it fits)",
    )
    parser.add_argument(
        "--prefix-memory", type=gibibytes, metavar="GIB", help="of it, to remember prompts in; 0: none (default: half of it)"
    )
    parser.add_argument(
        "--gpu-memory-fraction", type=share, metavar="F", help="share of a GPU's memory to use (default: all that is free)"
    )
    parser.add_argument("--queue-timeout", type=whole(0), default=0, metavar="S", help="of waiting; 0: no limit (default: 0)")
    parser.add_argument("--request-timeout", type=whole(0), default=0, metavar="S", help="of a request; 0: no limit (default: 0)")
    parser.add_argument(
        "--drain", type=whole(0), default=3, metavar="S", help="seconds that running requests get at the end (default: 3)"
    )
    parser.add_argument("--verbose", action="store_true", help="log at debug level")
    parser.add_argument("--log-json", action="store_true", help="log one JSON object a line, requests and their ids included")
    parser.add_argument("--log-prompts", action="store_true", help="with the requests, log what they say")
    parser.add_argument("--replica-index", type=whole(0), help=argparse.SUPPRESS)  # set by the supervisor


def gibibytes(text: str) -> float:
    """An argparse type: GiB, fractions allowed."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**20:
        raise argparse.ArgumentTypeError(f"must be a number of GiB >= 0, got {text!r}")
    return value


def share(text: str) -> float:
    """An argparse type: a share above 0, 1 at most."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and at most 1, got {text!r}")
    return value


def gpu_list(text: str) -> tuple[str, ...]:
    """An argparse type: device numbers (or UUIDs, as CUDA_VISIBLE_DEVICES takes them), separated by commas."""
    gpus = tuple(part.strip() for part in text.split(","))
    if not all(gpus):
        raise argparse.ArgumentTypeError(f"must be device numbers separated by commas, such as 0,1, got {text!r}")
    return gpus


def as_flags(args: argparse.Namespace, **other: object) -> list[str]:
    """The command line that means `args`, with the values of `other` in place of theirs."""
    parser = argparse.ArgumentParser()
    add_serve(parser)
    flags = []
    for action in parser._actions:
        value = other.get(action.dest, getattr(args, action.dest, None))
        if action.dest == "help" or value is None or value is False:
            continue
        name = action.option_strings[-1] if action.option_strings else None
        if name is None:
            flags.append(str(value))
        elif value is True:
            flags.append(name)
        else:
            values = value if isinstance(value, list) else [value]
            flags += [f"{name}={','.join(each) if isinstance(each, tuple) else each}" for each in values]
    return flags
