"""What remembered prefixes save and what they cost, over pools: time to the first token, snapshots, rounds, preemption.

    python -m benchmarks.prefixes --shapes qwen3.6-27b --out prefixes.json
    python -m benchmarks.prefixes --target FOLDER --drafter FOLDER --device cpu --dtype float32 --lengths 200

`ttft`: a prompt cold, then one that shares all but its last 64 tokens, then the same one again. `snapshot`: a hybrid's state into
pages and back. `rounds`: the same request with prefixes on and off, in turns; a round pays for neither. `preemption`: many
requests in pools that hold all of them, and half; tokens that differ are counted (in fp32 there must be none). Medians with
their range; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

LAST = 64  # tokens of a prompt that are its own
PAGE_BYTES = 2**40  # of prefixes: no limit but the pools'


def spread(values: list[float]) -> dict:
    return {"median": round(statistics.median(values), 3), "spread": [round(min(values), 3), round(max(values), 3)]}


class Bench:
    """A pair, and engines over it."""

    def __init__(self, args) -> None:
        self.args, self.device, dtype = args, torch.device(args.device), getattr(torch, args.dtype)
        if args.shapes:
            from benchmarks.shapes import random_pair

            self.pair = random_pair(args.shapes, self.device, dtype)
        else:
            from ddtree.models.dflash import load_drafter
            from ddtree.models.registry import load_target

            target = load_target(args.target, self.device, dtype)
            self.pair = (target, load_drafter(args.drafter, target.config, self.device, dtype))
        self.vocab_size = self.pair[0].config.vocab_size

    def engine(self, num_tokens: int, prefix_bytes: int = PAGE_BYTES, max_running: int = 1, max_context: int | None = None):
        from ddtree.engine.config import EngineConfig
        from ddtree.engine.loading import PREFILL_CHUNK
        from ddtree.engine.pooled import pooled_engine

        config = EngineConfig(
            max_context=max_context or num_tokens,
            max_tree_budget=self.args.budget,
            max_running=max_running,
            prefix_bytes=prefix_bytes,
            prefill_chunk=PREFILL_CHUNK,
        )
        graphs = not self.args.no_cuda_graphs
        return pooled_engine(*self.pair, config, num_tokens=num_tokens, max_rows=max_running * (1 + self.args.budget), graphs=graphs)

    def tokens(self, count: int, seed: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(0, self.vocab_size - 1, (count,), generator=generator).tolist())

    def request(self, prompt, max_tokens: int, **options):
        from ddtree.engine.request import Request

        return Request(tuple(prompt), max_tokens, tree_budget=self.args.budget, **options)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ttft(self, length: int) -> dict:
        """Milliseconds to the first token, and how many came from the cache."""
        engine, times, cached = self.engine(8 * length + 4096, max_context=length + 256), {}, {}
        engine.generate(self.request(self.tokens(length, 0), 4, cache_salt=None))  # warms up
        for number in range(self.args.repeats):
            system, salt = self.tokens(length - LAST, 100 + number), str(number)
            prompts = [system + self.tokens(LAST, 1000 + 10 * number + user) for user in range(2)]
            for kind, prompt in (("cold", prompts[0]), ("shared", prompts[1]), ("same", prompts[0])):
                stats = engine.generate(self.request(prompt, 4, cache_salt=salt, boundaries=(len(system),))).stats
                times.setdefault(kind, []).append(1000 * stats.ttft_s)
                cached.setdefault(kind, []).append(stats.cached_tokens)
        return {kind: spread(times[kind]) | {"cached_tokens": round(statistics.median(cached[kind]))} for kind in times}

    def snapshot(self) -> dict | None:
        """Milliseconds to keep a hybrid's state and to begin with it; None for a target that has none."""
        engine = self.engine(8192)
        state = engine.device_rounds.state
        if not state.state_bytes:
            return None
        pool, store, times = state.target.pool.recurrent, state.store, {"keep": [], "restore": []}
        for _ in range(self.args.repeats + 2):
            self.sync()
            marks = [time.perf_counter()]
            pages = store.keep(pool.read(0))
            self.sync()
            marks.append(time.perf_counter())
            pool.write(0, store.load(pages, state.state_bytes))
            self.sync()
            marks.append(time.perf_counter())
            state.allocator.release(pages)
            for kind, start, stop in zip(times, marks, marks[1:], strict=False):
                times[kind].append(1000 * (stop - start))
        facts = {"bytes": state.state_bytes, "pages": store.pages_of(state.state_bytes), "page_bytes": store.page_bytes}
        return {**{f"{kind}_ms": spread(each[2:]) for kind, each in times.items()}, **facts}

    def rounds(self) -> dict:
        """Milliseconds of a round by the engine's clock, prefixes on and off in turns."""
        prompt, count = self.tokens(256, 7), self.args.rounds
        engines = {"off": self.engine(2048, 0), "on": self.engine(2048)}
        times = {kind: [] for kind in engines}
        for repeat in range(self.args.repeats + 1):
            for kind in list(engines)[:: 1 if repeat % 2 else -1]:
                engine = engines[kind]
                request_id = engine.add(self.request(prompt, 1500, cache_salt=None))
                while engine.running_or_none(request_id) is None or engine.running(request_id).stats.decode_rounds < 4:
                    engine.step()
                started, before = time.perf_counter(), engine.running(request_id).stats.decode_rounds
                for _ in range(count):
                    engine.step()
                elapsed, done = time.perf_counter() - started, engine.running(request_id).stats.decode_rounds - before
                engine.abort(request_id)
                engine.device_rounds.drain()
                if repeat:
                    times[kind].append(1000 * elapsed / done)
        ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
        return {**{kind: spread(each) for kind, each in times.items()}, "on_over_off": spread(ratios)}

    def preemption(self) -> dict:
        """Tokens per second of many requests in pools for all of them, and for half."""
        args, results, answers = self.args, {}, {}
        each = args.prompt_tokens + args.max_tokens
        for kind, share in (("all", 1.2), ("half", 0.5)):
            size = max(int(share * args.requests * each), each + 64)
            engine = self.engine(size, args.prefix * PAGE_BYTES, args.requests, each + 32)
            for warm in (True, False):
                requests = [self.request(self.tokens(args.prompt_tokens, 500 * warm + i), args.max_tokens) for i in range(args.requests)]
                started = time.perf_counter()
                ids = [engine.add(request) for request in requests]
                tokens, preemptions = {i: [] for i in ids}, 0
                while engine.has_work:
                    for emission in engine.step():
                        if emission.finish_reason == "error":
                            raise RuntimeError(emission.error)
                        tokens[emission.request_id] += emission.token_ids
                        preemptions += emission.stats.preemptions if emission.stats else 0
                elapsed = time.perf_counter() - started
            answers[kind] = list(tokens.values())
            total = sum(map(len, answers[kind]))
            results[kind] = {"tokens_per_s": round(total / elapsed, 1), "preemptions": preemptions, "pool_tokens": size}
        differing = sum(one != other for one, other in zip(answers["all"], answers["half"], strict=True))
        return {**results, "requests": args.requests, "answers_that_differ": differing}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--parts", default="ttft,snapshot,rounds,preemption")
    parser.add_argument("--lengths", default="1024,8192", help="of prompts, comma-separated")
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prefix", action="store_true", help="remember prefixes while preempting too")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.shapes and not (args.target and args.drafter):
        parser.error("give --shapes, or --target and --drafter")
    bench, parts = Bench(args), args.parts.split(",")
    result = {
        "card": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "model": f"{args.shapes}, random weights" if args.shapes else f"{args.target.name}, {args.drafter.name}",
        "dtype": args.dtype,
        "command": "python -m benchmarks.prefixes " + " ".join(sys.argv[1:]),
    }
    work = {"snapshot": bench.snapshot, "rounds": bench.rounds, "preemption": bench.preemption}
    for part in parts:
        lengths = [int(length) for length in args.lengths.split(",")]
        result[part] = {str(n): bench.ttft(n) for n in lengths} if part == "ttft" else work[part]()
        print(f"{part}: {result[part]}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
