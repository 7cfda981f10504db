"""Time attention over pages and the commit of paths.

    python -m benchmarks.kernels.tree_attention [--sweep] [--repeats 30] [--out FILE]

Every shape is first checked against the twin, on random trees, and then timed by replays of a CUDA graph that goes
through several input sets, so that the caches do not hold one set's keys when it comes round again: as in a model,
whose layers have each their own. Needs a CUDA device (--small checks without one, in Triton's interpreter). A table for
people; the last line is JSON: microseconds as {"median", "least", "most"}, `floor_us` by the bytes of keys, values,
queries and outputs at the copy bandwidth that the run measured, `tflops` of the two products.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass, field

import torch

from benchmarks.kernels.replay import copy_bandwidth, replayed
from ddtree.kernels.tree_attention import commit_pages, tree_attention_pooled
from ddtree.kernels.tree_attention.plan import MOST_SPLITS, AttentionPlan, plan_attention
from ddtree.kernels.tree_attention.pooled_reference import (
    commit_pages_reference,
    tree_attention_pooled_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BYTES_OF_SETS = 300e6  # several times the L2 cache of any card
MODELS = {"27B": (24, 4, 256), "drafter": (32, 8, 128), "8B": (32, 8, 128), "SmolLM2": (9, 3, 64)}
# Relative norm; bf16 rounds the probabilities before the second product, in the twin as in the kernel.
CLOSE = {torch.bfloat16: 1e-2, torch.float32: 3e-6}


@dataclass(frozen=True)
class Shape:
    """What is timed: `rows` of each of `sequences`, each behind `context` committed tokens."""

    model: str
    mode: str  # tree | causal | block
    rows: int
    context: int
    sequences: int = 1
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 64
    heads: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        dtype = "" if self.dtype == torch.bfloat16 else " fp32"
        return f"{self.model} {self.mode} {self.rows} x {self.sequences}, context {self.context}{dtype}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.heads or MODELS[self.model]

    @property
    def num_keys(self) -> int:
        reach = self.context if self.window is None else min(self.context, self.window)
        return reach + self.rows

    @property
    def num_bytes(self) -> float:
        num_heads, num_kv_heads, head_dim = self.sizes
        rows = 2 * self.rows * num_heads + 2 * self.num_keys * num_kv_heads
        return self.sequences * rows * head_dim * self.dtype.itemsize

    @property
    def flops(self) -> float:
        num_heads, _, head_dim = self.sizes
        seen = self.num_keys - (self.rows / 2 if self.mode == "causal" else 0)
        return 4.0 * self.sequences * self.rows * num_heads * head_dim * seen

    @property
    def num_sets(self) -> int:
        return int(min(48, max(3, BYTES_OF_SETS // self.num_bytes)))


@dataclass(eq=False)
class Inputs:
    """One set; pages in random order, one random tree a sequence."""

    shape: Shape
    seed: int
    arguments: tuple = field(init=False)
    options: dict = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        num_heads, num_kv_heads, head_dim = shape.sizes
        generator = torch.Generator(DEVICE).manual_seed(self.seed)
        pages_each = -(-(shape.context + shape.rows) // shape.page_size)
        num_pages = shape.sequences * pages_each + 1

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=DEVICE).to(shape.dtype)

        def integers(values) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)

        order = torch.randperm(num_pages - 1, generator=generator, device=DEVICE) + 1
        pages = [normal(num_pages, shape.page_size, num_kv_heads, head_dim) for _ in range(2)]
        num_rows = shape.sequences * shape.rows
        self.arguments = (
            normal(num_rows, num_heads, head_dim),
            *pages,
            integers(order.view(shape.sequences, pages_each)),
            integers(torch.arange(shape.sequences)),
            integers(torch.arange(shape.sequences + 1) * shape.rows),
            integers([shape.context] * shape.sequences),
            self.masks() if shape.mode == "tree" else None,
            head_dim**-0.5,
            shape.rows,
        )
        self.options = {"window": shape.window, "bidirectional": shape.mode == "block"}

    def masks(self) -> torch.Tensor:
        """[R, N] uint8: each row's parent is one of the 20 before it."""
        generator = torch.Generator().manual_seed(self.seed)
        masks = []
        for _ in range(self.shape.sequences):
            mask = torch.eye(self.shape.rows, dtype=torch.uint8)
            for row in range(1, self.shape.rows):
                mask[row] |= mask[int(torch.randint(max(0, row - 20), row, (1,), generator=generator))]
            masks.append(mask)
        return torch.cat(masks).to(DEVICE)

    def attend(self, plan: AttentionPlan | None = None) -> torch.Tensor:
        if plan is None and DEVICE == "cuda":
            return tree_attention_pooled(*self.arguments, **self.options)
        from ddtree.kernels.tree_attention.triton import tree_attention_pooled_triton

        return tree_attention_pooled_triton(*self.arguments, **self.options, plan=plan)


def check(shape: Shape, plan: AttentionPlan | None = None) -> float:
    """The kernel's relative distance from its twin; ends the run where it is too large."""
    given = Inputs(shape, 99)
    expected = tree_attention_pooled_reference(*given.arguments, **given.options).double()
    error = float((given.attend(plan).double() - expected).norm() / expected.norm())
    if not error <= CLOSE[shape.dtype]:
        sys.exit(f"{shape.name}, {plan}: off by {error:.2e}; nothing was timed after this")
    return error


def timed(shape: Shape, repeats: int, bandwidth: float) -> dict:
    error = check(shape)
    sets = [Inputs(shape, seed) for seed in range(shape.num_sets)]
    timing = replayed([given.attend for given in sets], repeats)
    floor, tflops = shape.num_bytes / bandwidth * 1e6, shape.flops / timing["median"] * 1e-6
    spread = f"({timing['least']:.1f}-{timing['most']:.1f})"
    print(f"{shape.name:46s} {timing['median']:8.1f} us {spread:18s} floor {floor:7.1f}  {tflops:6.1f} TFLOPS", flush=True)
    return {"shape": shape.name, "us": timing, "floor_us": floor, "tflops": tflops, "error": error}


def shapes() -> list[Shape]:
    contexts = (512, 2048, 8192, 32_768)
    listed = [Shape("27B", "tree", rows, context) for rows in (1, 16, 64) for context in contexts]
    listed += [Shape("27B", "tree", rows, context) for rows in (32, 128, 256) for context in (512, 8192)]
    listed += [Shape("27B", "tree", rows, 512, sequences) for rows in (1, 16, 64) for sequences in (8, 32)]
    listed += [Shape("27B", "causal", 2048, context) for context in (0, 6144, 30_720)]
    listed += [Shape("drafter", "block", 16, context) for context in contexts]
    listed += [Shape("drafter", "block", 16, 8192, window=2048), Shape("drafter", "block", 16, 512, 8)]
    listed += [Shape("8B", "tree", rows, 2048) for rows in (1, 64, 256)]
    listed += [Shape("SmolLM2", "tree", rows, 512) for rows in (1, 17, 65)]
    return [*listed, Shape("SmolLM2", "tree", 65, 512, dtype=torch.float32), Shape("SmolLM2", "causal", 512, 0)]


def sweep(repeats: int) -> list[dict]:
    """Other tiles and splits at the shapes that matter; what does not fit the card is left out."""
    results = []
    for shape in (
        *(Shape("27B", "tree", rows, context) for rows, context in itertools.product((1, 16, 64, 256), (512, 8192))),
        Shape("27B", "tree", 64, 32_768),
        Shape("27B", "causal", 2048, 6144),
        Shape("drafter", "block", 16, 1024),
    ):
        sets = [Inputs(shape, seed) for seed in range(min(8, shape.num_sets))]
        default = plan_attention(sets[0].arguments[0], shape.sizes[1], shape.page_size, 1, shape.rows)
        group = shape.sizes[0] // shape.sizes[1]
        found = []
        for block_m, block_t, warps, stages, splits in itertools.product(
            (16, 32, 64, 128), (16, 32, 64), (4, 8), (1, 2, 3), {default.num_splits, max(1, default.num_splits // 2)}
        ):
            if block_m > max(16, 2 * shape.rows * group) or block_m * 64 < shape.rows * group:
                continue
            plan = AttentionPlan(block_m, block_t, warps, stages, splits, max(1, 128 // block_t))
            try:
                check(shape, plan)
                timing = replayed([lambda given=given, plan=plan: given.attend(plan) for given in sets], repeats)
            except Exception as error:  # too much shared memory, or a tile that this card's compiler refuses
                print(f"  {plan}: {type(error).__name__}", flush=True)
                continue
            found.append({"plan": list(vars(plan).values()), "us": timing["median"]})
        found.sort(key=lambda entry: entry["us"])
        print(f"{shape.name}: default {list(vars(default).values())}")
        for entry in found[:6]:
            print(f"  {entry['us']:8.1f} us  {entry['plan']}", flush=True)
        results.append({"shape": shape.name, "best": found[:10]})
    return results


def time_commit(length: int, repeats: int, bandwidth: float, layers: int = 16) -> dict:
    """A path of `length` rows of which every one moves, in the pages of a 27B's attention layers."""
    pages = [torch.randn(layers, 32, 64, 4, 256, device=DEVICE).to(torch.bfloat16) for _ in range(2)]
    table = torch.arange(32, dtype=torch.int32, device=DEVICE)[None]
    path = torch.arange(length, dtype=torch.int32, device=DEVICE)[None] * 3 + 1
    few = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([0], [700], [length])]
    given = (table, few[0], few[1], path, few[2])
    expected = [each.clone() for each in pages]
    commit_pages_reference(*expected, *given)
    commit_pages(*pages, *given)
    if not all(torch.equal(a, b) for a, b in zip(pages, expected, strict=True)):
        sys.exit(f"commit of {length} rows: differs from the twin")
    timing = replayed([lambda: commit_pages(*pages, *given)] * 8, repeats)
    floor = 4 * layers * length * 4 * 256 * 2 / bandwidth * 1e6
    print(f"commit {length} rows, {layers} layers {timing['median']:8.1f} us  floor {floor:.1f}", flush=True)
    return {"shape": f"commit {length}", "us": timing, "floor_us": floor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="time other tiles and splits too (minutes)")
    parser.add_argument("--small", action="store_true", help="small shapes, checks only; runs in the interpreter")
    parser.add_argument("--out", help="also write the JSON here")
    given = parser.parse_args()
    if given.small:
        plan = AttentionPlan(16, 16, 4, 1, 3, 1)
        modes = ("tree", "causal", "block")
        small = [Shape("small", mode, 5, 40, 2, None, torch.float32, 16, (4, 2, 16)) for mode in modes]
        print(json.dumps({"checked": {shape.name: check(shape, plan) for shape in small}}))
        return
    if DEVICE != "cuda":
        sys.exit("tree_attention: needs a CUDA device; --small checks without one")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s")
    results = [timed(shape, given.repeats, bandwidth) for shape in shapes()]
    commits = [time_commit(length, given.repeats, bandwidth) for length in (1, 8, 16)]
    line = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_per_s": bandwidth / 1e12}
    line |= {"command": " ".join(sys.argv), "most_splits": MOST_SPLITS, "attention": results, "commit": commits}
    if given.sweep:
        line["sweep"] = sweep(min(given.repeats, 5))
    text = json.dumps(line)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
