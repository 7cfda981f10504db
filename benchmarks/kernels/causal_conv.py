"""Time the short convolution's pooled kernels, gates included, at the shape of one Qwen3.6-27B layer.

    python -m benchmarks.kernels.causal_conv [--sweep] [--rows 1 16 64 256] [--repeats 30] [--small] [--out FILE.json]

Every kernel is first checked against its twin, at the shapes that are then timed; a fault ends the run. One CUDA graph
holds the kernel once per input set, so that the caches do not hold one set when it comes round again. `--sweep` also
times other tiles. Needs a CUDA device (`--small` also runs in Triton's interpreter, checks only). A table for people;
the last line is JSON: microseconds as {"median", "least", "most"}, `floor_us` from the bytes at the copy bandwidth
that the run measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable

import torch

from benchmarks.kernels.replay import copy_bandwidth, replayed
from ddtree.kernels.causal_conv import Gates, pooled_twins, triton_rows, triton_state

CHANNELS, HEADS, WIDTH, LAYERS = 10240, 48, 4, 48
PROJECTED = CHANNELS + 48 * 128 + 2 * HEADS  # columns of the input projection: mixed, z, b, a
LIMIT = 2.0**-6  # relative: results and gates are rounded to bf16, now and then to the neighbour
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETS = 16


class Inputs:
    """A round of one layer: `sequences` trees of `rows` rows each, all of them columns of one projection."""

    def __init__(self, rows: int, sequences: int, seed: int, channels: int = CHANNELS, heads: int = HEADS) -> None:
        torch.manual_seed(seed)
        self.rows, total = rows, rows * sequences
        projected = torch.randn(total, channels + PROJECTED - CHANNELS, device=DEVICE).bfloat16()
        self.x, self.a, self.b = projected[:, :channels], projected[:, -heads:], projected[:, -2 * heads : -heads]
        self.weight = torch.randn(channels, WIDTH, device=DEVICE).bfloat16()
        self.states = torch.randn(sequences, WIDTH - 1, channels, device=DEVICE).bfloat16()
        self.decay_rate, self.dt_bias = -torch.rand(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
        integers = {"dtype": torch.int32, "device": DEVICE}
        self.slots = torch.arange(sequences, **integers)
        self.starts = torch.arange(0, total + 1, rows, **integers)
        self.row_slots = self.slots.repeat_interleave(rows)
        self.row_indices = torch.arange(rows, **integers).repeat(sequences)
        back = torch.randint(1, 13, (total,), **integers)
        self.parents = torch.maximum(self.row_indices - back, torch.tensor(0, **integers))
        self.parents[self.row_indices == 0] = -1
        self.out = torch.full((total, channels), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        self.gates = Gates.of(self.a, self.b, self.decay_rate, self.dt_bias)

    @property
    def convolution(self) -> tuple:
        return self.x, self.weight, None, self.states

    def tree(self, home=triton_rows) -> None:
        indices = (self.slots, self.starts, self.row_slots, self.row_indices, self.parents)
        home.tree(*self.convolution, *indices, self.out, self.gates)

    def step(self, home=triton_state) -> None:
        home.step(*self.convolution, self.slots, self.starts, self.out, self.gates)

    def prefill(self, home=triton_rows) -> None:
        home.prefill(*self.convolution, self.slots, self.starts, self.rows, self.out, self.gates)

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        return self.out, self.states, self.gates.log_decay, self.gates.beta

    @property
    def num_bytes(self) -> int:
        """What has to be read and written without the states."""
        return sum(t.nbytes for t in (self.x, self.a, self.b, self.weight, self.out, *self.gates[-2:]))


def check(name: str, *sizes: int) -> float:
    """The worst error of the kernel against the twin; ends the run where it is too large."""
    kernel, twin = Inputs(*sizes), Inputs(*sizes)
    getattr(kernel, name)()
    getattr(twin, name)(pooled_twins)
    worst = 0.0
    for actual, expected in zip(kernel.results, twin.results, strict=True):
        error = (actual.double() - expected.double()).abs() / expected.double().abs().clamp_min(1.0)
        if not bool((error <= LIMIT).all()):
            raise SystemExit(f"{name} {sizes}: the kernel differs from its twin; nothing was timed after this")
        worst = max(worst, float(error.max()))
    return worst


def report(name: str, rows: int, sequences: int, timing: dict, moved: float, bandwidth: float) -> dict:
    floor = moved / bandwidth * 1e6
    spread = f"({timing['least']:.1f}-{timing['most']:.1f})"
    print(
        f"{name:>20} rows {rows:5d} x {sequences:2d}  {timing['median']:8.1f} us {spread:>16}  floor {floor:7.1f}",
        flush=True,
    )
    return {"kernel": name, "rows": rows, "sequences": sequences, "us": timing, "floor_us": floor}


def timed(name: str, rows: int, sequences: int, repeats: int, bandwidth: float) -> dict:
    check(name, rows, sequences, 99)
    sets = [Inputs(rows, sequences, seed) for seed in range(SETS if rows <= 256 else 2)]
    timing = replayed([getattr(given, name) for given in sets], repeats)
    states = sets[0].states.nbytes * (1 if name == "tree" else 2)
    return report(name, rows, sequences, timing, sets[0].num_bytes + states, bandwidth)


def commit_inputs(length: int, seed: int) -> tuple:
    torch.manual_seed(seed)
    x = torch.randn(LAYERS, 64, PROJECTED, device=DEVICE).bfloat16()[..., :CHANNELS]
    states = torch.randn(LAYERS, 1, WIDTH - 1, CHANNELS, device=DEVICE).bfloat16()
    integers = {"dtype": torch.int32, "device": DEVICE}
    path = torch.arange(length, **integers)[None] * 2
    indices = (torch.zeros(1, **integers), torch.tensor([0, 64], **integers), path, torch.full((1,), length, **integers))
    return x, states, *indices


def time_commit(length: int, repeats: int, bandwidth: float) -> dict:
    kernel, twin = commit_inputs(length, 9), commit_inputs(length, 9)
    triton_state.commit(*kernel)
    pooled_twins.commit(*twin)
    if not torch.equal(kernel[1], twin[1]):
        raise SystemExit(f"commit of {length} rows: the kernel differs from its twin; nothing was timed after this")
    sets = [commit_inputs(length, seed) for seed in range(4)]
    calls = [lambda given=given: triton_state.commit(*given) for given in sets]
    moved = 2 * kernel[1].nbytes
    return report(f"commit x {LAYERS} layers", length, 1, replayed(calls, repeats), moved, bandwidth)


def sweep(repeats: int, bandwidth: float) -> list[dict]:
    """Other tiles of the tree's and the step's kernel; the defaults are put back."""
    results = []

    def tried(home, names: tuple[str, str], values: tuple[int, int], name: str, run: Callable) -> None:
        before = [getattr(home, key) for key in names]
        try:
            for key, value in zip(names, values, strict=True):
                setattr(home, key, value)
            print(f"  {dict(zip(names, values, strict=True))}")
            results.append({"tiles": values} | run())
        finally:
            for key, value in zip(names, before, strict=True):
                setattr(home, key, value)

    for rows, channels in itertools.product((1, 2, 4, 8), (256, 512, 1024)):
        names = ("TREE_ROWS", "TREE_CHANNELS")
        tried(triton_rows, names, (rows, channels), "tree", lambda: timed("tree", 64, 1, repeats, bandwidth))
    for rows, channels in itertools.product((8, 16, 32, 64), (128, 256)):
        names = ("PREFILL_ROWS", "PREFILL_CHANNELS")
        tried(triton_rows, names, (rows, channels), "prefill", lambda: timed("prefill", 2048, 1, repeats, bandwidth))
    for channels in (128, 256, 512):
        names = ("STEP_CHANNELS", "COMMIT_CHANNELS")
        tried(triton_state, names, (channels, 512), "step", lambda: timed("step", 1, 1, repeats, bandwidth))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1025])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="time other tiles too")
    parser.add_argument("--small", action="store_true", help="small shapes, checks only; runs in the interpreter")
    parser.add_argument("--out", help="also write the JSON here")
    given = parser.parse_args()
    if given.small:
        shapes = {"tree": (9, 2), "step": (1, 2), "prefill": (9, 2)}
        print(json.dumps({"checked": {name: check(name, *size, 0, 40, 3) for name, size in shapes.items()}}))
        return
    if DEVICE != "cuda":
        sys.exit("causal_conv: needs a CUDA device; --small checks without one")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s")
    results = [timed("tree", rows, 1, given.repeats, bandwidth) for rows in given.rows]
    results += [timed("tree", 64, 8, given.repeats, bandwidth)]
    results += [timed("step", 1, sequences, given.repeats, bandwidth) for sequences in (1, 8, 32)]
    results += [timed("prefill", tokens, 1, max(3, given.repeats // 3), bandwidth) for tokens in (64, 2048, 8192)]
    results += [time_commit(length, given.repeats, bandwidth) for length in (1, 8)]
    line = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_per_s": bandwidth / 1e12}
    line |= {"command": " ".join(sys.argv), "kernels": results}
    if given.sweep:
        line["sweep"] = sweep(min(given.repeats, 10), bandwidth)
    text = json.dumps(line)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
