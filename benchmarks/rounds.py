"""What a decode round costs on a GPU: plain step, rounds by tree budget, context and prefill, against the floor of bytes.

    python -m benchmarks.rounds --shapes qwen3.6-27b --out rounds.json

Random weights of the published shapes; every round is real (draft, build, verify, accept, commit, one CUDA graph), and
which tokens match is drawn from a declared acceptance (`benchmarks.synthetic`). Times are device times of graph replays
by CUDA events, medians with spread; idle is wall time less device time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.shapes import PAIRS, random_conditioning, random_pair
from benchmarks.synthetic import ACCURACIES, SyntheticRound


def spread(values: list[float]) -> dict:
    """Median, and the range of the middle 90 %."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    return {"median": round(statistics.median(ordered), 4), "spread": [round(low, 4), round(high, 4)]}


class Timer:
    """Device times of repeated work, by CUDA events; wall times where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def times(self, work, repeats: int, before=lambda: None, warm_up: int = 3) -> list[float]:
        """Milliseconds of each `work()`; `before` runs ahead of each, outside the clock."""
        results = []
        for number in range(-warm_up, repeats):
            before()
            if self.cuda:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                work()
                stop.record()
                results.append((number, start, stop))
            else:
                begun = time.perf_counter()
                work()
                results.append((number, 1000 * (time.perf_counter() - begun), None))
        if self.cuda:
            torch.cuda.synchronize()
        return [a.elapsed_time(b) if b is not None else a for number, a, b in results if number >= 0]


class Bench:
    """A pair over pools with one sequence of a given context."""

    def __init__(self, args) -> None:
        from ddtree.engine.device_rounds import BUDGETS
        from ddtree.engine.graphs import bucket_of
        from ddtree.engine.pooled_state import PooledState

        self.args = args
        self.device = torch.device(args.device)
        self.dtype = getattr(torch, args.dtype)
        self.timer = Timer(self.device)
        started = time.perf_counter()
        self.target, self.drafter = random_pair(args.shapes, self.device, self.dtype)
        self.sync()
        self.made_s = time.perf_counter() - started
        tokens = max(*args.contexts, args.prefill) + 2048
        rows = 1 + bucket_of(max(args.budgets), BUDGETS)  # of the shape that the engine captures for it
        self.conditioning = random_conditioning(self.target, self.drafter, args.adapter) if "adapter" in args.parts.split(",") else None
        more = {"conditioning": self.conditioning, "batch_invariant": args.batch_invariant}
        self.state = PooledState(self.target, self.drafter, 1, tokens, tokens, rows, **more)
        for pool in (self.state.target.pool.attention, self.state.drafter.pool):
            pool.key_pages.normal_()
            pool.value_pages.normal_()
        if self.state.target.pool.recurrent is not None:
            self.state.target.pool.recurrent.states.normal_(0, 0.1)
        self.slot = self.open_slot()
        self.rounds = {}
        self.capture_s = {}

    def open_slot(self) -> int:
        """A slot that has all pages."""
        slot, pages = self.state.open(), self.state.allocator
        self.pages = pages.allocate(pages.num_free)
        self.state.table.give(slot, self.pages[: self.state.table.pages.shape[1]])
        return slot

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def round(self, budget: int, absorbs: bool = True, conditioned: bool = False) -> SyntheticRound:
        """The captured round of one sequence."""
        from ddtree.engine.device_round import RoundShape

        key = (budget, absorbs, conditioned)
        if key not in self.rounds:
            started = time.perf_counter()
            shape = RoundShape(1, budget, absorbs=absorbs, conditioned=conditioned)
            self.rounds[key] = SyntheticRound(self.state, shape, graphs=not self.args.no_cuda_graphs)
            self.sync()
            self.capture_s[str(key)] = round(time.perf_counter() - started, 2)
        device_round = self.rounds[key]
        device_round.launch([self.slot], [1], [budget], [device_round.num_slots - 1]).wait()
        return device_round

    def at(self, context: int):
        """A function that puts the sequence back to `context` tokens."""
        return lambda: self.state.table.context_lengths[self.slot].fill_(context)

    def time_round(self, budget: int, context: int, **kind: bool) -> tuple[dict, float]:
        """Milliseconds a round of a `kind` (see `round`), and the synthetic acceptance length."""
        device_round, lengths = self.round(budget, **kind), []
        set_context = self.at(context)
        times = self.timer.times(device_round.lanes[0].graph.replay, self.args.repeats, set_context)
        for _ in range(self.args.repeats):
            set_context()
            lengths.append(int(device_round.relaunch().wait()[0, 0]))
        return spread(times), statistics.mean(lengths)

    def idle(self, budget: int, rounds: int) -> dict:
        """Milliseconds the device waits between rounds, driven by the engine itself."""
        from ddtree.engine.config import EngineConfig
        from ddtree.engine.device_rounds import DeviceRounds
        from ddtree.engine.engine import Engine
        from ddtree.engine.graph_actors import GraphDrafter, GraphTarget
        from ddtree.engine.pooled_memory import PooledMemory
        from ddtree.engine.request import Request

        state = self.state
        state.close(self.slot)
        state.allocator.release(self.pages)
        config = EngineConfig(max_context=state.table.max_tokens - state.most_staged, max_tree_budget=max(self.args.budgets))
        actors, vocab_size = (GraphTarget(state, (1, budget + 1)), GraphDrafter(state)), self.target.config.vocab_size
        engine = Engine(*actors, config, vocab_size, memory=PooledMemory(state))
        engine.device_rounds = DeviceRounds(state, round_type=SyntheticRound)
        prompt = tuple(torch.randint(0, self.target.config.vocab_size - 1, (512,)).tolist())
        results = []
        for _ in range(2):  # the first warms up
            request_id = engine.add(Request(prompt, max_tokens=rounds * 16 + 64, tree_budget=budget))
            while engine.running_or_none(request_id) is None or not engine.running(request_id).stats.output_tokens:
                engine.step()
            stats, walls = engine.running(request_id).stats, []
            emitted = stats.output_tokens
            started = time.perf_counter()
            while stats.decode_rounds < rounds:
                begun = time.perf_counter()
                engine.step()
                walls.append(1000 * (time.perf_counter() - begun))
            elapsed = time.perf_counter() - started
            results.append((walls, (stats.output_tokens - emitted) / elapsed))
            engine.abort(request_id)
            engine.step()
        self.slot = self.open_slot()
        device_round = next(iter(engine.device_rounds._rounds.values()))
        device_round.launch([self.slot], [1], [budget], [device_round.num_slots - 1]).wait()
        device = statistics.median(self.timer.times(device_round.lanes[0].graph.replay, 20, self.at(800)))
        walls, tokens_per_s = results[-1]
        gaps = spread([wall - device for wall in walls[2:]])
        return {"idle_ms": gaps, "engine_round_ms": spread(walls[2:]), "device_round_ms": round(device, 4), "tokens_per_s": round(tokens_per_s, 1)}

    def prefill(self, length: int, chunk: int) -> dict:
        """Milliseconds to commit a prompt, the drafter's context included."""
        from ddtree.caches.pooled_rows import PREFILL, consecutive_rows

        state, table = self.state, self.state.table
        slots = torch.tensor([self.slot], dtype=torch.int32, device=self.device)
        ids = torch.randint(0, self.target.config.vocab_size - 1, (1, length), device=self.device)
        features = torch.empty(chunk, state.target.feature_width, dtype=self.dtype, device=self.device)

        def run() -> None:
            for start in range(0, length, chunk):
                part = ids[:, start : start + chunk].contiguous()
                count = part.shape[1]
                hidden = state.target(consecutive_rows(PREFILL, part, slots, table.context_lengths), features)
                table.context_lengths[self.slot] += count
                lengths = torch.tensor([count], dtype=torch.int32, device=self.device)
                state.drafter.absorb(features[None, :count], slots, lengths)
            state.target.logits(hidden[-1:])

        with torch.inference_mode():
            return spread(self.timer.times(run, 5, self.at(0), warm_up=1))

    def stages(self, budget: int, context: int) -> dict:
        """Milliseconds of each stage, each captured by itself."""
        from ddtree.caches.pooled_rows import PooledRows  # noqa: F401  (names the rows below)
        from ddtree.engine.graphs import Graph

        device_round, graphs = self.round(budget), not self.args.no_cuda_graphs
        state, kept = self.state, {}

        def draft():
            kept["candidates"] = device_round.draft(state.roots[device_round.slots.long()])

        def build():
            kept["rows"] = device_round.build(state.roots[device_round.slots.long()], kept["candidates"])

        def verify():
            kept["tokens"] = device_round.verify(kept["rows"])

        def accept():
            kept["path"] = device_round.accept(kept["tokens"])

        def commit():
            path, lengths, _, bonus = kept["path"]
            state.target.pool.commit(device_round.slots, kept["rows"].starts, path, lengths)
            device_round.commit(kept["rows"], path, lengths, bonus)

        results = {}
        self.at(context)()
        for name, work in (("draft", draft), ("build", build), ("verify", verify), ("accept", accept), ("commit", commit)):
            graph = Graph(work, self.device, graphs)
            graph.replay()
            before = self.at(context) if name == "commit" else lambda: None
            results[name] = spread(self.timer.times(graph.replay, 20, before))
            self.sync()
            self.at(context)()
        return results

    def kernels(self, budget: int, context: int, top: int = 40) -> list:
        """Where the device time of one round goes, by kernel: name, launches, milliseconds."""
        if self.device.type != "cuda":
            return []
        from torch.profiler import ProfilerActivity, profile

        device_round = self.round(budget)
        self.at(context)()
        self.sync()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            device_round.lanes[0].graph.replay()
            self.sync()
        totals: dict[str, list] = {}
        for event in profiler.events():
            entry = totals.setdefault(event.name, [0, 0.0])
            entry[0] += 1
            entry[1] += event.device_time_total / 1000
        ordered = sorted(totals.items(), key=lambda item: -item[1][1])[:top]
        return [[name[:90], count, round(ms, 3)] for name, (count, ms) in ordered]


def weight_bytes(model) -> int:
    """What a forward reads: all but the embedding, of which it takes single rows."""
    embedding = model.embed_tokens.nbytes if hasattr(model, "embed_tokens") else 0
    tied = embedding and model.config.tie_word_embeddings
    return sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large device-to-device copy, reads and writes counted."""
    if device.type != "cuda":
        return float("nan")
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = Timer(device).times(lambda: target.copy_(source), 10)
    return 2 * source.nbytes / (statistics.median(times) / 1000)


def matrix_rate(device: torch.device) -> float:
    """Floating-point operations per second of a large bf16 product of random values."""
    if device.type != "cuda":
        return float("nan")
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    times = Timer(device).times(lambda: left @ right, 10)
    return 2 * 8192**3 / (statistics.median(times) / 1000)


def main() -> int:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=PAIRS, default="qwen3.6-27b")
    parser.add_argument("--budgets", type=numbers, default=[15, 31, 63, 127])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--contexts", type=numbers, default=[8192, 32768])
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", default="plain,rounds,stages,kernels,contexts,prefill,idle")
    parser.add_argument("--adapter", choices=("none", "grandparent"), default="grandparent", help="summary of the part adapter's random one")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true", help="the forwards whose rows do not know their company")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(args)
    parts = args.parts.split(",")
    bandwidth = copy_bandwidth(bench.device)
    plain_bytes, draft_bytes = weight_bytes(bench.target), weight_bytes(bench.drafter)
    head = bench.target.lm_head.weight.nbytes
    cuda = bench.device.type == "cuda"
    result = {
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "shapes": f"{args.shapes}, {args.dtype}, random weights, context {args.context}",
        "batch_invariant": args.batch_invariant,
        "command": "python -m benchmarks.rounds " + " ".join(sys.argv[1:]),
        "acceptance": f"synthetic: the drafter's rank r with probability a (1 - a)^r, a by depth {list(ACCURACIES)}",
        "copy_bytes_per_s": bandwidth,
        "matrix_flops_per_s": matrix_rate(bench.device),
        "weight_bytes": {"target": plain_bytes, "drafter": draft_bytes, "head": head},
        "block_size": bench.drafter.config.block_size,
        "floor_ms": {"plain": 1000 * plain_bytes / bandwidth, "round": 1000 * (plain_bytes + draft_bytes + head) / bandwidth},
        "model_made_s": round(bench.made_s, 1),
    }
    try:
        measure(bench, args, parts, result)
    finally:
        result["capture_s"] = bench.capture_s
        result["peak_bytes"] = torch.cuda.max_memory_allocated() if cuda else None
        result["pool_bytes"] = bench.state.num_bytes
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def measure(bench: Bench, args, parts: list[str], result: dict) -> None:
    """Fill `result`, part by part, printing as it goes."""

    def show(name: str, value) -> None:
        print(f"{name:28} {value}", flush=True)

    if "plain" in parts:
        result["plain_ms"], _ = bench.time_round(0, args.context, absorbs=False)
        show("plain", result["plain_ms"])
        result["plain_absorbing_ms"], _ = bench.time_round(0, args.context)
        show("plain, drafter's context kept", result["plain_absorbing_ms"])
    if "rounds" in parts:
        result["round_ms"], result["round_efficiency"], result["acceptance_length_synthetic"] = {}, {}, {}
        for budget in args.budgets:
            times, acceptance = bench.time_round(budget, args.context)
            result["round_ms"][str(budget)] = times
            if "plain_ms" in result:
                least, most = (result["plain_ms"]["spread"][i] / times["spread"][1 - i] for i in (0, 1))
                efficiency = result["plain_ms"]["median"] / times["median"]
                result["round_efficiency"][str(budget)] = {"median": round(efficiency, 4), "spread": [round(least, 4), round(most, 4)]}
            result["acceptance_length_synthetic"][str(budget)] = round(acceptance, 3)
            show(f"round at budget {budget}", f"{times}, acceptance {acceptance:.2f} (synthetic)")
    if "adapter" in parts:
        result["adapter"] = {"summary": args.adapter, "width": bench.conditioning.adapter.config.width, "rank": bench.conditioning.adapter.config.rank}
        for budget in args.budgets:
            without, with_it = (bench.time_round(budget, args.context, conditioned=kind)[0] for kind in (False, True))
            result["adapter"][str(budget)] = {"round_ms": without, "conditioned_round_ms": with_it, "cost_ms": round(with_it["median"] - without["median"], 4)}
            show(f"adapter at budget {budget}", result["adapter"][str(budget)])
    if "kernels" in parts:
        result["kernels"] = {}
        for budget in (0, args.budgets[min(2, len(args.budgets) - 1)]):
            result["kernels"][str(budget)] = bench.kernels(budget, args.context)
            for row in result["kernels"][str(budget)][:24]:
                show(f"  {row[1]:4} x {row[2]:8.3f} ms", row[0])
    if "stages" in parts:
        result["stage_ms"] = {}
        for budget in args.budgets:
            result["stage_ms"][str(budget)] = bench.stages(budget, args.context)
            show(f"stages at {budget}", {k: v["median"] for k, v in result["stage_ms"][str(budget)].items()})
    if "contexts" in parts:
        budget = 63 if 63 in args.budgets else args.budgets[0]
        result["context_round_ms"] = {str(args.context): bench.time_round(budget, args.context)[0]}
        for context in args.contexts:
            result["context_round_ms"][str(context)] = bench.time_round(budget, context)[0]
        show(f"round at {budget} by context", result["context_round_ms"])
    if "prefill" in parts:
        result[f"prefill_{args.prefill}_ms"] = bench.prefill(args.prefill, args.prefill_chunk)
        show(f"prefill of {args.prefill}", result[f"prefill_{args.prefill}_ms"])
    if "gated_delta" in parts:
        from benchmarks.kernels.gated_delta import time_tree

        result["gated_delta_us"] = {}
        for rows in (32, 64, 128, 256):
            us = time_tree(rows, 1, 20, result["copy_bytes_per_s"])["us"]
            spread_us = [round(us["least"], 2), round(us["most"], 2)]
            result["gated_delta_us"][str(rows)] = {"median": round(us["median"], 2), "spread": spread_us}
    if "idle" in parts:
        budget = 63 if 63 in args.budgets else args.budgets[0]
        result["engine"] = bench.idle(budget, 60)
        result["idle_ms"] = result["engine"].pop("idle_ms")
        show("idle between rounds", result["idle_ms"])
        show("engine", result["engine"])


if __name__ == "__main__":
    sys.exit(main())
