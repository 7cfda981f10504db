"""How long a first start on a GPU takes: fresh processes, an empty Triton cache, rounds measured for the auto budget.

    python -m benchmarks.cold_start --target T.gguf --drafter D --out cold_start.json

Each run is a process of its own: load, measure and capture the rounds of `auto`, answer one request. `ahead` compiles the rounds'
kernels side by side before they are captured, `one by one` when each is first launched; `cold` begins with an empty cache, `warm`
with the one that the run before it left. Seconds from the start of the process. `late` kernels were compiled at a launch. What
has not ended after `--seconds` is reported as unfinished. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# Name, requests side by side, whether kernels are compiled ahead, whether the cache is emptied before.
RUNS = (
    ("ahead, cold", 1, True, True),
    ("ahead, warm", 1, True, False),
    ("one by one, warm", 1, False, False),
    ("ahead, cold, 8 requests", 8, True, True),
    ("ahead, warm, 8 requests", 8, True, False),
    ("one by one, cold", 1, False, True),
)
ACCEPTANCE = {"0": {"1": 1.4, "16": 2.24, "64": 2.56, "256": 2.84}}  # where there is no card; changes nothing that is timed
COLUMNS = ("import_s", "load_s", "measure_s", "ready_s", "first_request_s", "second_request_s", "compiled", "late", "late_in_request")


def main() -> int:
    args = parse()
    if args.child:
        print(json.dumps(start(args)))
        return 0
    deadline, rows, device = time.time() + args.seconds, {}, None
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, max_running, ahead, empty) in enumerate(RUNS):
            if empty:
                cache = f"{folder}/{number}"
            row = run(args, cache, max_running, ahead, deadline - time.time())
            device = row.pop("device", device)
            rows[name] = row
            print(f"{name}: " + ", ".join(f"{key} {row[key]}" for key in ("unfinished_after_s", *COLUMNS, "error") if key in row), flush=True)
    command = "python -m benchmarks.cold_start " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~")
    result = {"runs": rows, "card": device, "threads": len(os.sched_getaffinity(0)), "command": command}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=115.0, help="for all runs together")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # when its process was started
    parser.add_argument("--max-running", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--one-by-one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, cache: str, max_running: int, ahead: bool, seconds: float) -> dict:
    """One start in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.cold_start", "--target", args.target, "--drafter", args.drafter]
    command += ["--device", args.device, "--max-context", args.max_context, "--max-running", max_running]
    command += ["--child", time.time()] + ([] if ahead else ["--one-by-one"])
    if seconds < 1:
        return {"unfinished_after_s": 0}
    try:
        done = subprocess.run(
            [str(word) for word in command], env=os.environ | {"TRITON_CACHE_DIR": cache}, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"unfinished_after_s": round(seconds, 1)}
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr.splitlines()[-1:]}


def start(args: argparse.Namespace) -> dict:
    """The start itself."""
    import logging

    import torch
    import triton

    from ddtree.engine import device_rounds, graph_actors
    from ddtree.engine.loading import load_engine
    from ddtree.engine.measure import start_auto
    from ddtree.engine.request import Request

    logging.basicConfig(level=logging.WARNING, format=f"{args.max_running}: %(message)s")
    logging.getLogger("ddtree").setLevel(logging.DEBUG)
    if args.one_by_one:
        device_rounds.compile_ahead = graph_actors.compile_ahead = lambda rehearsals, device: 0
    compiled = []  # name, whether at a launch

    def listen(src, cache_hit, **_) -> None:
        if not cache_hit:
            compiled.append((src.name, threading.current_thread() is threading.main_thread()))

    triton.knobs.compilation.listener = listen
    seconds = lambda: round(time.time() - args.child, 2)  # noqa: E731
    row = {"import_s": seconds()}
    engine = load_engine(args.target, args.drafter, device=args.device, max_context=args.max_context, max_running=args.max_running)
    row["load_s"] = seconds()
    auto = start_auto(engine, getattr(engine.drafter.conditioning, "acceptance", None) or ACCEPTANCE)
    row |= {"ready_s": seconds(), "compiled": len(compiled), "late": sum(late for _, late in compiled)}
    row["measure_s"] = round(row["ready_s"] - row["load_s"], 2)
    row["late_names"] = sorted(name for name, late in compiled if late)
    before = len(compiled)
    for number in ("first", "second"):
        began = time.time()
        engine.generate(Request(tuple(range(100, 140)), 32, tree_budget="auto"))
        row[f"{number}_request_s"] = round(time.time() - began, 2)
    row["late_in_request"] = len(compiled) - before
    row["late_in_request_names"] = sorted(name for name, _ in compiled[before:])
    row["costs"] = auto.describe()
    row["device"] = torch.cuda.get_device_name() if engine.target.device.type == "cuda" else "cpu"
    return row


if __name__ == "__main__":
    sys.exit(main())
