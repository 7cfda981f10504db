"""Time linear layers of few rows, with the norm, gate or residual sum around them, against cuBLAS and the weight's bytes.

    python -m benchmarks.kernels.linear [--models 27B 8B SmolLM2] [--rows 1 4 16 32 64 128] [--sweep] [--repeats 20] [--out FILE]

Every case is first checked against the twin at the shape that is then timed, outputs poisoned with NaN and a row beyond
R untouched; a fault ends the run. "ours" is what the dispatcher does (the plan is named beside it), "rule" the plan that
it would take of a shape nobody measured, "cuBLAS" the norm kernel, the product and the SwiGLU kernel or the in-place sum.
One CUDA graph holds the layer once per weight, of weights that are together several times the L2 cache; its replays
are timed with events. The floor is the weight's bytes at the copy bandwidth that the run measured. `--sweep` times the
candidate plans too (compiled first, by several processes) and prints the best as lines for `plan.TUNED`.
Needs a CUDA device. A table for people; the last line is JSON: microseconds as {"median", "least", "most"}.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.kernels.replay import copy_bandwidth, replayed
from ddtree.kernels.linear import fused_linear, fused_linear_reference
from ddtree.kernels.linear.dispatch import fused_linear_cublas, fused_linear_planned
from ddtree.kernels.linear.plan import BUCKETS, Plan, bucket_of, plan_of, power_of_two, untuned

ROTATED_BYTES = 400 << 20
MOST_SHARED = 99 * 1024
CLOSE = 1e-2  # relative norm of the error; bf16 rounds to 4e-3
COMPILERS = 12


@dataclass(frozen=True)
class Layer:
    """A weight [num_columns, width] (with swiglu [2F, K], gates first) and what stands around it."""

    model: str
    name: str
    num_columns: int
    width: int
    norm: str | None = None
    swiglu: bool = False
    residual: bool = False

    @property
    def num_outputs(self) -> int:
        return self.num_columns // 2 if self.swiglu else self.num_columns

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_columns * self.width

    def __str__(self) -> str:
        return f"{self.model} {self.name} {self.num_columns} x {self.width}"


LAYERS = [
    Layer("27B", "recurrent inputs", 16_480, 5_120, norm="zero_centred"),
    Layer("27B", "query, key, value", 14_336, 5_120, norm="zero_centred"),
    Layer("27B", "output", 5_120, 6_144, residual=True),
    Layer("27B", "gate, up", 34_816, 5_120, norm="zero_centred", swiglu=True),
    Layer("27B", "down", 5_120, 17_408, residual=True),
    Layer("27B", "head", 248_320, 5_120),
    Layer("27B", "drafter features", 5_120, 25_600),
    Layer("8B", "query, key, value", 6_144, 4_096, norm="plain"),
    Layer("8B", "output", 4_096, 4_096, residual=True),
    Layer("8B", "gate, up", 24_576, 4_096, norm="plain", swiglu=True),
    Layer("8B", "down", 4_096, 12_288, residual=True),
    Layer("8B", "head", 151_936, 4_096),
    Layer("SmolLM2", "query, key, value", 960, 576, norm="plain"),
    Layer("SmolLM2", "output", 576, 576, residual=True),
    Layer("SmolLM2", "gate, up", 3_072, 576, norm="plain", swiglu=True),
    Layer("SmolLM2", "down", 576, 1_536, residual=True),
    Layer("SmolLM2", "head", 49_152, 576),
]

# block_n, block_k, warps, stages(, parts of K), by bucket of rows
CANDIDATES = {
    1: (
        (1, 256, 1, 1), (2, 256, 1, 1), (4, 256, 1, 1), (8, 256, 1, 1), (1, 512, 2, 1), (2, 512, 2, 1), (4, 512, 2, 1),
        (8, 512, 2, 1), (1, 1024, 4, 1), (2, 1024, 4, 1), (4, 1024, 4, 1), (8, 1024, 4, 1), (1, 2048, 8, 1),
        (2, 2048, 8, 1), (4, 2048, 8, 1), (2, 1024, 2, 1), (1, 2048, 4, 1), (2, 2048, 4, 1), (1, 1024, 1, 1),
        (2, 1024, 1, 1), (4, 1024, 2, 1), (2, 1024, 4, 3), (4, 1024, 4, 3), (4, 512, 2, 4), (4, 2048, 8, 3),
    ),
    16: (
        (16, 64, 4, 10), (16, 128, 2, 4), (16, 128, 4, 8), (16, 256, 2, 4), (16, 256, 4, 4), (16, 512, 4, 4),
        (32, 64, 4, 6), (32, 128, 2, 4), (32, 128, 4, 3), (32, 128, 4, 5), (32, 256, 4, 4), (64, 64, 4, 6),
        (64, 128, 4, 4), (64, 128, 8, 4), (128, 64, 4, 4), (128, 64, 8, 5), (64, 64, 4, 5, 2), (64, 128, 4, 4, 2),
        (64, 128, 4, 4, 4), (128, 64, 4, 5, 4),
    ),
    32: (
        (16, 128, 4, 4), (32, 64, 4, 6), (32, 128, 4, 3), (32, 128, 4, 4), (64, 64, 4, 4), (64, 64, 4, 6),
        (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (64, 64, 4, 5, 2), (64, 128, 4, 3, 4),
    ),
    64: (
        (16, 128, 4, 4), (32, 64, 4, 4), (32, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 5), (64, 64, 8, 4),
        (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4), (64, 64, 4, 5, 2), (64, 64, 4, 5, 4),
    ),
    128: (
        (32, 64, 4, 4), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 4), (128, 32, 8, 5), (128, 64, 8, 3),
        (64, 64, 8, 4, 2), (64, 64, 8, 4, 3), (128, 64, 8, 3, 2),
    ),
}  # fmt: skip


def candidates(layer: Layer, bucket: int) -> list[Plan]:
    """Those that fit every card's shared memory; K need not be filled up to more than its next power of two."""
    plans = {}
    for given in CANDIDATES[bucket]:
        plan = Plan(*given)
        if bucket == 1:
            plan = plan._replace(block_k=min(plan.block_k, power_of_two(layer.width)))
        columns = plan.block_n * (2 if layer.swiglu else 1)
        stages = plan.num_stages - 1 if bucket < 64 else plan.num_stages  # one is in registers, but for wgmma
        shared = 2 * stages * plan.block_k * (columns + (bucket if bucket > 1 else 0))
        if shared <= MOST_SHARED or plan.num_stages == 1:
            plans[plan] = None
    return list(plans)


def arguments(layer: Layer, rows: int, seed: int = 0) -> dict:
    """x, norm and out (also the residual, where there is one) of a layer; a row more than R in out's storage."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, layer.width, generator=generator, device="cuda").bfloat16()
    norm = None
    if layer.norm is not None:
        scale = torch.rand(layer.width, generator=generator, device="cuda") + 0.5
        norm = (scale if layer.norm == "zero_centred" else scale.bfloat16(), 1e-6, layer.norm)
    out = torch.full((rows + 1, layer.num_outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    if layer.residual:
        out[:rows] = torch.randn(rows, layer.num_outputs, generator=generator, device="cuda")
    return {"x": x, "norm": norm, "storage": out, "out": out[:rows], "residual": out[:rows] if layer.residual else None}


def weights_of(layer: Layer) -> torch.Tensor:
    """[sets, N, K] bf16, together several times the L2 cache."""
    sets = max(1, -(-ROTATED_BYTES // layer.num_bytes))
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.empty(sets, layer.num_columns, layer.width, dtype=torch.bfloat16, device="cuda")
    for weight in weights:
        weight.normal_(0, layer.width**-0.5, generator=generator)
    return weights


def call_of(layer: Layer, given: dict, weight: torch.Tensor, way: str | Plan) -> Callable[[], torch.Tensor]:
    """One execution: "ours" as the dispatcher decides, "cublas", or a plan."""
    x, norm, residual, out = given["x"], given["norm"], given["residual"], given["out"]
    if way == "ours":
        return lambda: fused_linear(x, weight, norm=norm, swiglu=layer.swiglu, residual=residual, out=out)
    if way == "cublas":
        return lambda: fused_linear_cublas(x, weight, None, norm, layer.swiglu, residual, out)
    return lambda: fused_linear_planned(x, weight, None, norm, layer.swiglu, residual, out, way)


def check(layer: Layer, rows: int, weight: torch.Tensor, way: str | Plan) -> None:
    given = arguments(layer, rows)
    residual = None if given["residual"] is None else given["residual"].clone()
    expected = fused_linear_reference(given["x"], weight, norm=given["norm"], swiglu=layer.swiglu, residual=residual)
    found = call_of(layer, given, weight, way)().float()
    error = float((found - expected.float()).norm() / expected.float().norm())
    if not error <= CLOSE or not given["storage"][rows].isnan().all():
        raise SystemExit(f"{layer}, {rows} rows, {way}: differs from the twin by {error:.2e}; nothing was timed after this")


def timed(layer: Layer, rows: int, weights: torch.Tensor, way: str | Plan, repeats: int) -> dict[str, float]:
    given = arguments(layer, rows)
    return replayed([call_of(layer, given, weight, way) for weight in weights], repeats)


def compile_plan(task: tuple[Layer, int, Plan]) -> None:
    """Into Triton's cache. A weight of one row repeated is laid out alike to the compiler."""
    layer, rows, plan = task
    weight = torch.zeros(1, layer.width, dtype=torch.bfloat16, device="cuda").expand(layer.num_columns, layer.width)
    try:
        call_of(layer, arguments(layer, rows), weight, plan)()
    except Exception as error:  # the sweep meets it again and says so
        print(f"{layer}, {rows} rows, {plan}: {type(error).__name__}", flush=True)


def sweep(layer: Layer, bucket: int, weights: torch.Tensor, cublas: dict, repeats: int) -> dict:
    """The best plan of a bucket's largest R, None where cuBLAS is faster."""
    found = []

    def attempt(plan: Plan) -> None:
        try:
            check(layer, bucket, weights[0], plan)
            found.append((timed(layer, bucket, weights, plan, repeats)["median"], plan))
        except Exception as error:  # a plan that does not compile is an answer too
            print(f"  {plan}: {type(error).__name__}: {str(error)[:80]}", flush=True)

    for plan in candidates(layer, bucket):
        attempt(plan)
    found.sort()
    if layer.norm is not None:
        for _, plan in found[:2]:
            attempt(plan._replace(norm_first=True))
        found.sort()
    for median, plan in found[:3]:
        print(f"  {median:8.1f} us  {tuple(plan)}", flush=True)
    best = found[0] if found and found[0][0] < cublas["median"] else (cublas["median"], None)
    all_plans = [{"plan": list(plan), "us": median} for median, plan in found]
    return {"key": [bucket, layer.num_columns, layer.width, layer.swiglu], "best": best[1], "us": best[0], "all": all_plans}


def print_tuned(swept: list[dict]) -> None:
    """Lines to paste into `plan.TUNED`."""
    print("TUNED = {")
    for entry in swept:
        print(f"    {tuple(entry['key'])}: {entry['best']}," if entry["best"] is None else
              f"    {tuple(entry['key'])}: Plan{tuple(entry['best'])},")  # fmt: skip
    print("}")


def time_layer(layer: Layer, options: argparse.Namespace, bandwidth: float, results: list, swept: list) -> None:
    weights = weights_of(layer)
    floor = layer.num_bytes / bandwidth * 1e6
    for rows in options.rows:
        check(layer, rows, weights[0], "ours")
        ours, cublas = (timed(layer, rows, weights, way, options.repeats) for way in ("ours", "cublas"))
        plan = plan_of(rows, weights[0], layer.swiglu)
        rule = untuned(bucket_of(rows), layer.num_columns, layer.width, layer.swiglu)
        check(layer, rows, weights[0], rule)
        by_rule = timed(layer, rows, weights, rule, options.repeats)
        entry = {"layer": str(layer), "rows": rows, "ours_us": ours, "cublas_us": cublas, "floor_us": floor}
        entry |= {"rule_us": by_rule, "rule": list(rule)}
        results.append(entry | {"plan": None if plan is None else list(plan)})
        figures = " ".join(f"{us:8.1f}" for us in (ours["median"], by_rule["median"], cublas["median"], floor))
        figures = f"{figures} {floor / min(ours['median'], by_rule['median']):6.0%}"
        print(f"{layer!s:42s} {rows:4d} {figures}  {'cuBLAS' if plan is None else tuple(plan)}", flush=True)
        if options.sweep and rows in BUCKETS:
            swept.append(sweep(layer, bucket_of(rows), weights, cublas, max(5, options.repeats // 2)))


def main() -> None:
    models = list(dict.fromkeys(layer.model for layer in LAYERS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 32, 64, 128], help="up to 128")
    parser.add_argument("--sweep", action="store_true", help=f"the candidate plans, at those rows of {BUCKETS}")
    parser.add_argument("--repeats", type=int, default=20, help="timed replays of each graph")
    parser.add_argument("--out", type=Path, help="also write the JSON here, with every plan of a sweep")
    options = parser.parse_args()
    layers = [layer for layer in LAYERS if layer.model in options.models]
    if options.sweep:
        buckets = [rows for rows in options.rows if rows in BUCKETS]
        tasks = [(layer, rows, plan) for layer in layers for rows in buckets for plan in candidates(layer, rows)]
        with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_plan, tasks))
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s")
    print(f"{'us':42s} {'rows':>4s} {'ours':>8s} {'rule':>8s} {'cuBLAS':>8s} {'floor':>8s} {'of it':>6s}  plan")
    results, swept = [], []
    for layer in layers:
        time_layer(layer, options, bandwidth, results, swept)
        torch.cuda.empty_cache()
    if swept:
        print_tuned(swept)
    facts = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_s": bandwidth}
    if options.out:
        options.out.write_text(json.dumps(facts | {"results": results, "sweep": swept}, indent=1) + "\n")
    best = [{key: entry[key] for key in ("key", "best", "us")} for entry in swept]
    print(json.dumps(facts | {"results": results, "sweep": best}))


if __name__ == "__main__":
    main()
