"""Time batch-invariant linear layers against cuBLAS and the weight's bytes, from one row to a prompt's chunk.

    python -m benchmarks.kernels.linear_invariant [--models 27B 8B SmolLM2] [--rows 1 16 64 65 128 512] [--sweep] [--out FILE]

Each case is checked against the twin first, and each number of rows for the same bits as among the most rows; a fault ends the
run. `--sweep` times other plans too (`plan.plan_invariant` holds the choice; a plan serves every number of rows, so they are
weighed together). Needs a CUDA device. A table for people; the last line is JSON: microseconds as {"median", "least", "most"}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.kernels.linear import CLOSE, LAYERS, Layer, arguments, call_of, weights_of
from benchmarks.kernels.replay import copy_bandwidth, replayed
from ddtree.kernels import fused
from ddtree.kernels.linear import fused_linear_reference
from ddtree.kernels.linear.plan import InvariantPlan, plan_invariant
from ddtree.kernels.linear.triton_invariant import invariant_linear_triton

# columns and K of a tile, programs that parts of K may make, stages of tiles of 64 rows and of 128
CANDIDATES = (
    (64, 64, 160, 4, 3), (64, 64, 320, 4, 3), (64, 128, 160, 3, 2), (64, 128, 320, 3, 2), (128, 64, 160, 4, 3), (128, 64, 320, 4, 3),
    (128, 64, 1, 4, 3), (64, 64, 1, 4, 3), (128, 128, 160, 2, 1), (256, 64, 160, 2, 1), (128, 64, 160, 3, 3),
)  # fmt: skip


def call(layer: Layer, given: dict, weight: torch.Tensor, plan: InvariantPlan):
    """One execution, the norm included."""
    norm, residual, out = given["norm"], given["residual"], given["out"]

    def run() -> torch.Tensor:
        x = given["x"] if norm is None else fused.rms_norm(given["x"], *norm)
        return invariant_linear_triton(x, weight, None, layer.swiglu, residual, out, plan)

    return run


def check(layer: Layer, all_rows: list[int], weight: torch.Tensor, plan: InvariantPlan) -> None:
    """As the twin says, and each row the same bits beside any of these numbers of others."""
    most, whole = max(all_rows), None
    for rows in sorted(all_rows, reverse=True):
        given = arguments(layer, most)
        for name in ("x", "out", "residual"):
            given[name] = None if given[name] is None else given[name][:rows]
        residual = None if given["residual"] is None else given["residual"].clone()
        found = call(layer, given, weight, plan)().clone()
        if whole is None:
            expected = fused_linear_reference(given["x"], weight, norm=given["norm"], swiglu=layer.swiglu, residual=residual).float()
            error = float((found.float() - expected).norm() / expected.norm())
            if not error <= CLOSE:
                raise SystemExit(f"{layer}, {rows} rows, {plan}: differs from the twin by {error:.2e}; nothing was timed after this")
            whole = found
        if not torch.equal(found, whole[:rows]):
            raise SystemExit(f"{layer}, {plan}: {rows} rows have other bits than among {most}; nothing was timed after this")


def candidates(layer: Layer) -> list[InvariantPlan]:
    """Plans to weigh against the rule's."""
    plans = []
    for block_n, block_k, programs, few_stages, many_stages in CANDIDATES:
        columns = block_n // 2 if layer.swiglu else block_n
        num_parts = max(1, min(programs // -(-layer.num_outputs // columns), layer.width // 512))
        rows = ((64, 64, 4, few_stages), (None, 128, 8, many_stages))
        plans += [InvariantPlan(columns, block_k, num_parts, rows), InvariantPlan(columns, block_k, num_parts, ((None, 64, 4, few_stages),))]
    return list(dict.fromkeys(plans))


def timed(layer: Layer, rows: int, weights: torch.Tensor, plan: InvariantPlan | None, repeats: int) -> dict:
    """Microseconds by `plan`, or by cuBLAS."""
    given = arguments(layer, rows)
    calls = [call(layer, given, weight, plan) if plan else call_of(layer, given, weight, "cublas") for weight in weights]
    return replayed(calls, repeats)


def time_layer(layer: Layer, options: argparse.Namespace, bandwidth: float) -> dict:
    weights = weights_of(layer)
    floor = layer.num_bytes / bandwidth * 1e6
    rule = plan_invariant(weights[0], layer.swiglu)
    check(layer, options.rows, weights[0], rule)
    entry = {"layer": str(layer), "floor_us": floor, "plan": list(rule), "rows": {}}
    for rows in options.rows:
        ours, cublas = (timed(layer, rows, weights, plan, options.repeats) for plan in (rule, None))
        entry["rows"][str(rows)] = {"ours_us": ours, "cublas_us": cublas}
        print(f"{layer!s:42s} {rows:5d} {ours['median']:8.1f} {cublas['median']:8.1f} {floor:8.1f}", flush=True)
    if options.sweep:
        entry["sweep"] = []
        for plan in candidates(layer):
            try:
                check(layer, options.rows, weights[0], plan)
                us = [round(timed(layer, rows, weights, plan, 5)["median"], 1) for rows in options.rows]
            except Exception as error:  # a plan that does not compile is an answer too
                print(f"  {plan}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            entry["sweep"].append({"plan": list(plan), "us": us})
            print(f"  {us}  {tuple(plan)}", flush=True)
    return entry


def main() -> None:
    models = list(dict.fromkeys(layer.model for layer in LAYERS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 65, 128, 512])
    parser.add_argument("--sweep", action="store_true", help="other plans too")
    parser.add_argument("--repeats", type=int, default=20, help="timed replays of each graph")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s")
    print(f"{'us':42s} {'rows':>5s} {'ours':>8s} {'cuBLAS':>8s} {'floor':>8s}")
    results = []
    for layer in LAYERS:
        if layer.model in options.models:
            results.append(time_layer(layer, options, bandwidth))
            torch.cuda.empty_cache()
    result = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_s": bandwidth, "results": results}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
