"""Time the row-wise steps: norms, gates, SwiGLU, argmax, and norm + rotation + cache write.

    python -m benchmarks.kernels.fused [--rows 1 16 64 128 256 2048] [--repeats 30] [--out FILE]

Qwen3.6-27B's shapes, bf16. Every kernel is checked against its twin and then timed by replays of a CUDA graph that goes
through several input sets. The same steps as the modules write them, and by torch.compile where --compile is given,
stand beside them. Needs a CUDA device (--small checks without one, in Triton's interpreter). A table for people; the
last line is JSON: microseconds as {"median", "least", "most"}, `floor_us` by the bytes at the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import torch

from benchmarks.kernels.replay import copy_bandwidth, replayed
from ddtree.kernels import fused
from ddtree.kernels.qk_rotary import qk_rotary_pooled_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BFLOAT16 = torch.bfloat16
EPS = 1e-6
CLOSE = 2e-2 if DEVICE == "cpu" else 8e-3  # the interpreter cuts bf16 off instead of rounding
SETS = 8
STEPS = ("rms_norm", "swiglu", "gate_heads", "norm_and_gate", "argmax", "qk_rotary")


class Inputs:
    """Arguments of every step for R rows; `small` divides the widths."""

    def __init__(self, num_rows: int, seed: int, small: int = 1) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*size: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=DEVICE).to(dtype)

        width, inner, vocab_size = 5120 // small, 17408 // small, 248_320 // small
        heads, kv_heads, head_dim, value_heads, value_dim = 24 // small, 4, 256 // small, 48 // small, 128 // small
        projected = normal(num_rows, 2 * heads + 2 * kv_heads, head_dim)
        mixed = normal(num_rows, value_heads * value_dim + 96)[:, : value_heads * value_dim]
        self.arguments = {
            "rms_norm": (normal(num_rows, width), normal(width, dtype=torch.float32), EPS, "zero_centred"),
            "swiglu": (normal(num_rows, 2 * inner),),
            "gate_heads": (normal(num_rows, heads, head_dim), projected[:, heads + 2 * kv_heads :]),
            "norm_and_gate": (
                normal(num_rows, value_heads, value_dim),
                mixed.unflatten(1, (value_heads, value_dim)),
                normal(value_dim, dtype=torch.float32),
                EPS,
            ),
            "argmax": (normal(num_rows, vocab_size),),
        }
        rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
        num_pages = -(-(num_rows + 100) // 64)
        pages = [torch.zeros(num_pages, 64, kv_heads, head_dim, dtype=BFLOAT16, device=DEVICE) for _ in range(2)]
        frequencies = torch.rand(head_dim // 4, generator=generator, device=DEVICE)
        sign = torch.ones_like(frequencies)
        sign[: len(sign) // 2] = -1
        scale = normal(heads + kv_heads, head_dim, dtype=torch.float32)
        self.arguments["qk_rotary"] = (
            projected, rows + 100, frequencies, sign, 1.0, scale, "zero_centred", EPS, *pages,
            torch.arange(num_pages, dtype=torch.int32, device=DEVICE)[None], torch.zeros_like(rows), rows,
            torch.full((1,), 100, dtype=torch.int32, device=DEVICE),
            torch.empty(num_rows, heads, head_dim, dtype=BFLOAT16, device=DEVICE),
        )  # fmt: skip

    def num_bytes(self, step: str) -> float:
        """Read once, written once."""
        values = self.arguments[step]
        if step == "qk_rotary":
            return 2 * (values[0].numel() - values[-1].numel()) * 2  # all but the gate's heads
        read = sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
        written = {"swiglu": 0.5, "argmax": 0.0}.get(step, 1.0) * values[0].numel() * 2
        return read + written


def kernel(step: str) -> Callable:
    from ddtree.kernels.fused import triton
    from ddtree.kernels.qk_rotary.triton import qk_rotary_pooled_triton

    return qk_rotary_pooled_triton if step == "qk_rotary" else getattr(triton, f"{step}_triton")


def twin(step: str) -> Callable:
    return qk_rotary_pooled_reference if step == "qk_rotary" else getattr(fused, f"{step}_reference")


def check(step: str, given: Inputs) -> float:
    """The kernel's relative distance from its twin; ends the run where it is too large."""
    arguments = given.arguments[step]
    written = [*arguments[8:10], arguments[-1]] if step == "qk_rotary" else []
    results = []
    for function in (twin(step), kernel(step)):
        result = function(*arguments)
        results.append(torch.cat([each.flatten().double() for each in written or [result]]))
        for each in written:
            each.zero_()
    expected, actual = results
    error = float((actual - expected).norm() / expected.norm())
    if not error <= (0.0 if step == "argmax" else CLOSE):
        sys.exit(f"{step}: off by {error:.2e}; nothing was timed after this")
    return error


def timed(step: str, num_rows: int, repeats: int, bandwidth: float, compiled: bool) -> dict:
    sets = [Inputs(num_rows, seed) for seed in range(SETS if num_rows <= 256 else 3)]
    error = check(step, sets[0])
    floor = sets[0].num_bytes(step) / bandwidth * 1e6
    timing = replayed([lambda given=given: kernel(step)(*given.arguments[step]) for given in sets], repeats)
    line = f"{step:14s} rows {num_rows:5d} {timing['median']:8.1f} us ({timing['least']:.1f}-{timing['most']:.1f})  floor {floor:6.1f}"
    result = {"step": step, "rows": num_rows, "us": timing, "floor_us": floor, "error": error}
    if step != "qk_rotary":  # whose twin looks at values on the device, which no graph can hold
        others = {"modules": twin(step)} | ({"compiled": torch.compile(twin(step))} if compiled else {})
        for name, function in others.items():
            calls = [lambda given=given, function=function: function(*given.arguments[step]) for given in sets]
            result[f"{name}_us"] = replayed(calls, repeats)
            line += f"  {name} {result[f'{name}_us']['median']:.1f}"
    print(line, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256, 2048])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--compile", action="store_true", help="time torch.compile's kernels too")
    parser.add_argument("--small", action="store_true", help="small shapes, checks only; runs in the interpreter")
    parser.add_argument("--out", help="also write the JSON here")
    given = parser.parse_args()
    if given.small:
        print(json.dumps({"checked": {step: check(step, Inputs(3, 0, small=8)) for step in STEPS}}))
        return
    if DEVICE != "cuda":
        sys.exit("fused: needs a CUDA device; --small checks without one")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s")
    pairs = [(step, rows) for step in STEPS for rows in given.rows if step != "argmax" or rows <= 256]
    results = [timed(step, rows, given.repeats, bandwidth, given.compile) for step, rows in pairs]
    line = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_per_s": bandwidth / 1e12}
    text = json.dumps(line | {"command": " ".join(sys.argv), "steps": results})
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
