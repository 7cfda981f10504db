"""Time the gated delta rule's pooled kernels at the shape of one Qwen3.6-27B layer, against their floors.

    python -m benchmarks.kernels.gated_delta [--sweep] [--rows 32 64 128 256] [--repeats 30] [--small] [--out FILE.json]

Every kernel is first checked against the fp64 closed form, at the shapes that are then timed; a fault ends the run.
One CUDA graph holds the kernel once per input set, so that the L2 cache does not hold one set when it comes round
again; its replays are timed with events. `--sweep` also times every way to cut the launches up and names the best.
Needs a CUDA device (`--small` also runs in Triton's interpreter, checks only). A table for people; the last line is
JSON: microseconds as {"median", "least", "most"}, `floor_us` from the bytes at the copy bandwidth that the run measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch

from benchmarks.kernels.replay import copy_bandwidth, replayed
from ddtree.kernels.gated_delta import (
    gated_delta_prefill,
    gated_delta_tree,
    triton_prefill,
    triton_state,
    triton_tree,
)
from ddtree.kernels.gated_delta.triton_prefill import PrefillTiles
from ddtree.kernels.gated_delta.triton_tree import TreeTiles

LAYER = SimpleNamespace(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128)
SMALL = SimpleNamespace(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=32)
LAYERS = 48
CLOSE = 1e-5  # against fp64, relative to the root mean square of the rows' norms
BARS = {32: 18.0, 64: 25.0, 128: 45.0, 256: 110.0}  # microseconds, by rows
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# rows, other rows, values, warps, stages; a compilation takes seconds, so not every product of them.
TREE_TILES = [
    TreeTiles(*tiles)
    for tiles in (
        (16, 32, 32, 4, 1), (16, 32, 64, 4, 1), (16, 32, 64, 8, 1), (16, 32, 128, 4, 1), (16, 32, 128, 8, 1),
        (16, 64, 64, 4, 1), (16, 64, 64, 8, 1), (16, 64, 128, 8, 1), (32, 32, 32, 4, 1), (32, 32, 64, 8, 1),
        (32, 64, 64, 4, 1), (32, 64, 64, 8, 1), (32, 64, 64, 8, 2), (32, 64, 128, 8, 1),
    )
]  # fmt: skip
# rows, values, warps, stages
PREFILL_TILES = [
    PrefillTiles(*tiles)
    for tiles in (
        (16, 32, 4, 1), (16, 64, 4, 1), (16, 64, 8, 1), (32, 32, 4, 1), (32, 64, 4, 1), (32, 64, 8, 1),
        (32, 64, 8, 2), (32, 128, 8, 1), (64, 64, 4, 1), (64, 64, 8, 1), (64, 128, 8, 1),
    )
]  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """One round of a layer: random trees of equal size, one per sequence, all values as the layer makes them."""

    mixed: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    mask: torch.Tensor | None
    states: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    out: torch.Tensor
    keys: torch.Tensor
    solved: torch.Tensor
    log_decays: torch.Tensor

    @classmethod
    def random(cls, shape, rows: int, sequences: int, seed: int, tree: bool = True) -> Inputs:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        total, heads = rows * sequences, shape.num_value_heads

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=DEVICE)

        width = 2 * shape.num_key_heads * shape.key_dim + heads * shape.value_dim
        mask = random_mask(rows, seed).repeat(sequences, 1).to(DEVICE) if tree else None
        integers = {"dtype": torch.int32, "device": DEVICE}
        return cls(
            normal(total, width).bfloat16(),
            -0.5 * torch.nn.functional.softplus(normal(total, heads)),
            normal(total, heads).sigmoid(),
            mask,
            normal(sequences, heads, shape.key_dim, shape.value_dim),
            torch.arange(sequences, **integers),
            torch.arange(0, total + 1, rows, **integers),
            torch.full((total, heads, shape.value_dim), torch.nan, device=DEVICE, dtype=torch.bfloat16),
            torch.full((total, shape.num_key_heads, shape.key_dim), torch.nan, device=DEVICE),
            torch.full((total, heads, shape.value_dim), torch.nan, device=DEVICE),
            torch.full((total, heads), torch.nan, device=DEVICE, dtype=torch.float64),
        )

    def run_tree(self, shape, rows: int, tiles: TreeTiles | None = None, out: torch.Tensor | None = None) -> None:
        given = (self.mixed, self.log_decay, self.beta, self.mask, self.states, self.slots, self.starts)
        written = (self.out if out is None else out, self.keys, self.solved, self.log_decays)
        triton_tree.tree(*given, rows, shape, *written, tiles=tiles)

    def run_step(self, shape) -> None:
        given = (self.mixed, self.log_decay, self.beta, self.states)
        triton_state.step(*given, self.slots, self.starts, shape, self.out)

    def run_prefill(self, shape, tiles: PrefillTiles | None = None, out: torch.Tensor | None = None) -> None:
        given = (self.mixed, self.log_decay, self.beta, self.states, self.slots, self.starts)
        triton_prefill.prefill(*given, shape, self.out if out is None else out, tiles)

    def heads(self, shape, rows: slice) -> tuple[torch.Tensor, ...]:
        """query, key, value, g, beta of some rows, fp64."""
        keys = shape.num_key_heads * shape.key_dim
        values = shape.num_value_heads * shape.value_dim
        query, key, value = self.mixed[rows].double().split((keys, keys, values), dim=-1)
        query, key = (part.unflatten(-1, (shape.num_key_heads, shape.key_dim)) for part in (query, key))
        value = value.unflatten(-1, (shape.num_value_heads, shape.value_dim))
        return query, key, value, self.log_decay[rows].double(), self.beta[rows].double()


def random_mask(rows: int, seed: int) -> torch.Tensor:
    """[rows, rows] uint8: every parent is one of the 12 rows before its child."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.eye(rows, dtype=torch.uint8)
    for row in range(1, rows):
        back = int(torch.randint(1, min(row, 12) + 1, (1,), generator=generator))
        mask[row] |= mask[row - back]
    return mask


def worst_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error (norm) of a row and head, relative to the root mean square of their norms."""
    error = torch.linalg.vector_norm(actual.double() - expected, dim=-1)
    norm = torch.linalg.vector_norm(expected, dim=-1).square().mean().sqrt()
    return float((error / norm).max()) if bool(error.isfinite().all()) else float("inf")


def check_tree(shape, rows: int, sequences: int = 1, tiles: TreeTiles | None = None) -> float:
    """The worst error of out and the solved rows, out in fp32; ends the run where it is too large."""
    given = Inputs.random(shape, rows, sequences, seed=99)
    out = torch.full(given.out.shape, torch.nan, device=DEVICE)
    given.run_tree(shape, rows, tiles, out)
    worst = 0.0
    for sequence in range(sequences):
        span = slice(sequence * rows, (sequence + 1) * rows)
        mask = given.mask[span] != 0
        expected, staged = gated_delta_tree(*given.heads(shape, span), mask, given.states[sequence].double())
        worst = max(worst, worst_error(out[span], expected), worst_error(given.solved[span], staged.solved))
    return checked(worst, f"tree of {rows} rows, {tiles or 'default tiles'}")


def check_prefill(shape, tokens: int, tiles: PrefillTiles | None = None) -> float:
    given = Inputs.random(shape, tokens, 1, seed=98, tree=False)
    before, out = given.states[0].double(), torch.full(given.out.shape, torch.nan, device=DEVICE)
    given.run_prefill(shape, tiles, out)
    expected, state = gated_delta_prefill(*given.heads(shape, slice(0, tokens)), before)
    worst = max(worst_error(out, expected), worst_error(given.states[0], state))
    return checked(worst, f"prefill of {tokens} tokens, {tiles or 'default tiles'}")


def check_step(shape, sequences: int) -> float:
    given = Inputs.random(shape, 1, sequences, seed=97)
    before, worst = given.states.double(), 0.0
    given.run_step(shape)
    for sequence in range(sequences):
        span = slice(sequence, sequence + 1)
        _, state = gated_delta_prefill(*given.heads(shape, span), before[sequence])
        worst = max(worst, worst_error(given.states[sequence], state))
    return checked(worst, f"step of {sequences} sequences")


def checked(error: float, what: str) -> float:
    if not error <= CLOSE:
        raise SystemExit(f"{what}: error {error:.1e} against fp64, allowed {CLOSE:.0e}; nothing was timed after this")
    return error


def rotating(shape, rows: int, sequences: int, tree: bool = True) -> list[Inputs]:
    """Input sets whose states are several times the L2 cache."""
    count = 40 if sequences == 1 else 8
    return [Inputs.random(shape, rows, sequences, seed, tree) for seed in range(count)]


def time_tree(rows: int, sequences: int, repeats: int, bandwidth: float) -> dict:
    error, sets = check_tree(LAYER, rows, sequences), rotating(LAYER, rows, sequences)
    timing = replayed([lambda given=given: given.run_tree(LAYER, rows) for given in sets], repeats)
    first = sets[0]
    read = (first.mixed, first.log_decay, first.beta, first.mask, first.states)
    moved = sum(t.nbytes for t in (*read, first.out, first.keys, first.solved, first.log_decays))
    bar = BARS.get(rows) if sequences == 1 else None
    return line("tree", rows, sequences, timing, moved / bandwidth, error, bar)


def time_step(sequences: int, repeats: int, bandwidth: float) -> dict:
    error, sets = check_step(LAYER, sequences), rotating(LAYER, 1, sequences)
    timing = replayed([lambda given=given: given.run_step(LAYER) for given in sets], repeats)
    moved = 2 * sets[0].states.nbytes + sets[0].mixed.nbytes + sets[0].out.nbytes
    return line("step", 1, sequences, timing, moved / bandwidth, error, None)


def time_prefill(tokens: int, repeats: int, bandwidth: float) -> dict:
    error = check_prefill(LAYER, min(tokens, 2048) - 1)
    given = Inputs.random(LAYER, tokens, 1, 0, tree=False)
    timing = replayed([lambda: given.run_prefill(LAYER)], max(3, repeats // 5))
    moved = given.mixed.nbytes + given.out.nbytes + 2 * given.states.nbytes
    bar = 0.15e6 / LAYERS * tokens / 8192  # 0.15 s for 8,192 tokens in all layers
    return line("prefill", tokens, 1, timing, moved / bandwidth, error, bar)


def time_commit(length: int, repeats: int, bandwidth: float, layers: int = LAYERS) -> dict:
    """All layers in one launch, a path of `length` of 64 rows; the states alone are several times the L2 cache."""
    first = Inputs.random(LAYER, 64, 1, 0)
    first.run_tree(LAYER, 64)
    given = [t.unsqueeze(0).repeat(layers, *[1] * t.dim()) for t in (first.states, first.keys, first.solved, first.log_decays)]
    path = torch.arange(length, dtype=torch.int32, device=DEVICE)[None]
    lengths = torch.full((1,), length, dtype=torch.int32, device=DEVICE)
    indices = (first.slots, first.starts, path, lengths)
    timing = replayed([lambda: triton_state.commit(*given, *indices)] * 4, repeats)
    moved = 2 * given[0].nbytes + length * (given[1][:, 0].nbytes + given[2][:, 0].nbytes)
    return line(f"commit x {layers} layers", length, 1, timing, moved / bandwidth, None, None)


def line(kernel: str, rows: int, sequences: int, timing: dict, floor_s: float, error: float | None, bar: float | None) -> dict:
    result = {"kernel": kernel, "rows": rows, "sequences": sequences, "us": timing, "floor_us": floor_s * 1e6}
    result |= {"error": error, "bar_us": bar}
    shown = "" if bar is None else f"  bar {bar:7.1f} {'met' if timing['median'] <= bar else 'MISSED'}"
    spread = f"({timing['least']:.1f}-{timing['most']:.1f})"
    precise = "" if error is None else f"  error {error:.0e}"
    print(
        f"{kernel:>20} rows {rows:5d} x {sequences:2d}  {timing['median']:8.1f} us {spread:>16}"
        f"  floor {floor_s * 1e6:7.1f}{shown}{precise}",
        flush=True,
    )
    return result


def swept(name: str, tilings: list, check: Callable, calls: Callable, repeats: int) -> dict:
    """Every tiling that compiles and is right, by time; what does not fit is named and left out."""
    timed = []
    for tiles in tilings:
        try:
            check(tiles)
            timed.append((replayed(calls(tiles), repeats)["median"], tiles))
        except SystemExit as fault:
            print(f"  {fault}", flush=True)
        except Exception as fault:  # out of shared memory or registers: an answer, too
            print(f"  {name} {tiles}: {str(fault).splitlines()[0][:120]}", flush=True)
    timed.sort(key=lambda pair: pair[0])
    for time, tiles in timed[:8]:
        print(f"  {name:>14} {time:8.1f} us  {tiles}", flush=True)
    return {"name": name, "best": [{"us": time} | asdict(tiles) for time, tiles in timed[:8]]}


def sweep(rows: list[int], repeats: int) -> list[dict]:
    results = []
    for count in rows:
        sets = rotating(LAYER, count, 1)
        tilings = [tiles for tiles in TREE_TILES if tiles.rows <= max(16, count)]
        results.append(
            swept(
                f"tree {count}",
                tilings,
                lambda tiles, count=count: check_tree(LAYER, count, 1, tiles),
                lambda tiles, count=count, sets=sets: [
                    lambda given=given: given.run_tree(LAYER, count, tiles) for given in sets
                ],
                repeats,
            )
        )
    long = Inputs.random(LAYER, 2048, 1, 0, tree=False)
    results.append(
        swept(
            "prefill 2048",
            PREFILL_TILES,
            lambda tiles: check_prefill(LAYER, 300, tiles),
            lambda tiles: [lambda: long.run_prefill(LAYER, tiles)],
            repeats,
        )
    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 256, 1025])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="time every way to cut the launches up")
    parser.add_argument("--small", action="store_true", help="small shapes, checks only; runs in the interpreter")
    parser.add_argument("--out", help="also write the JSON here")
    given = parser.parse_args()
    if given.small:
        errors = {"tree": check_tree(SMALL, 40, 2), "prefill": check_prefill(SMALL, 37), "step": check_step(SMALL, 2)}
        print(json.dumps({"checked": errors}))
        return
    if DEVICE != "cuda":
        sys.exit("gated_delta: needs a CUDA device; --small checks without one")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s")
    results = [time_tree(rows, 1, given.repeats, bandwidth) for rows in given.rows]
    results += [time_tree(64, sequences, given.repeats, bandwidth) for sequences in (2, 8)]
    results += [time_step(sequences, given.repeats, bandwidth) for sequences in (1, 8, 32)]
    results += [time_commit(length, given.repeats, bandwidth) for length in (1, 8, 16)]
    results += [time_prefill(tokens, given.repeats, bandwidth) for tokens in (64, 512, 2048, 8192)]
    report = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_per_s": bandwidth / 1e12}
    report |= {"command": " ".join(sys.argv), "kernels": results}
    if given.sweep:
        report["sweep"] = sweep([rows for rows in given.rows if rows <= 256], min(given.repeats, 10))
    text = json.dumps(report)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
