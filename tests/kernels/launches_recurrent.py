"""Launches of the gated delta rule's and its convolution's kernels at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ddtree.kernels.causal_conv import Gates, triton_gates, triton_rows
from ddtree.kernels.causal_conv import triton_state as conv_state
from ddtree.kernels.gated_delta import triton_prefill, triton_state, triton_tree

LARGE = SimpleNamespace(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128)  # Qwen3.6-27B
SMALL = SimpleNamespace(num_key_heads=4, num_value_heads=8, key_dim=32, value_dim=32)


def integers(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def delta_inputs(shape, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """mixed, log_decay, beta; the states; out."""
    heads, values = shape.num_value_heads, shape.value_dim
    mixed = torch.empty(rows, 2 * shape.num_key_heads * shape.key_dim + heads * values, dtype=dtype)
    gates = [torch.empty(rows, heads) for _ in range(2)]
    states = torch.empty(2, heads, shape.key_dim, values)
    return [mixed, *gates, states, torch.empty(rows, heads, values, dtype=dtype)]


def tree(shape, rows: int, dtype: torch.dtype, causal: bool = False, tiles=None):
    def launch() -> None:
        mixed, log_decay, beta, states, out = delta_inputs(shape, rows, dtype)
        mask = None if causal else torch.empty(rows, rows, dtype=torch.uint8)
        keys = torch.empty(rows, shape.num_key_heads, shape.key_dim)
        solved, sums = torch.empty(out.shape), torch.empty(rows, shape.num_value_heads, dtype=torch.float64)
        given = (mixed, log_decay, beta, mask, states, integers(1), integers(2), rows, shape, out, keys, solved, sums)
        triton_tree.tree(*given, tiles=tiles)

    return launch


def prefill(shape, dtype: torch.dtype, tiles=None):
    def launch() -> None:
        mixed, log_decay, beta, states, out = delta_inputs(shape, 100, dtype)
        triton_prefill.prefill(mixed, log_decay, beta, states, integers(1), integers(2), shape, out, tiles)

    return launch


def step_and_commit() -> None:
    mixed, log_decay, beta, states, out = delta_inputs(LARGE, 1, torch.bfloat16)
    triton_state.step(mixed, log_decay, beta, states, integers(1), integers(2), LARGE, out)
    keys, solved = torch.empty(1, 8, 16, 128), torch.empty(1, 8, 48, 128)
    sums = torch.empty(1, 8, 48, dtype=torch.float64)
    triton_state.commit(states[None], keys, solved, sums, integers(1), integers(2), integers(1, 16), integers(1))


def convolutions(channels: int, heads: int, dtype: torch.dtype):
    def launch() -> None:
        wide = torch.empty(1, 8, 2 * channels, dtype=dtype)
        x, weight = wide[..., :channels], torch.empty(channels, 4, dtype=dtype)
        states, out = torch.empty(1, 2, 3, channels, dtype=dtype), torch.empty(8, channels, dtype=dtype)
        gates = Gates.of(wide[0, :, -heads:], wide[0, :, :heads], torch.empty(heads), torch.empty(heads))
        triton_gates.run_gates(gates)
        given, pools = (x[0], weight, None, states[0]), (integers(1), integers(2))
        for parents in (integers(8), None):
            triton_rows.tree(*given, *pools, integers(8), integers(8), parents, out, gates)
        for computed in (gates, None):  # in the same launch, or not at all
            triton_rows.prefill(*given, *pools, 8, out, computed)
            conv_state.step(*given, *pools, out, computed)
        conv_state.commit(x, states, *pools, integers(1, 16), integers(1))

    return launch


def launches():
    half, single = torch.bfloat16, torch.float32
    yield "convolutions", convolutions(10240, 48, half)
    yield "step and commit", step_and_commit
    for rows in (16, 32, 64, 256, 1025):
        yield f"tree {rows}", tree(LARGE, rows, half)
    yield "chain 64", tree(LARGE, 64, half, causal=True)
    for rows in (64, 256):
        yield f"tree {rows} in one launch", tree(LARGE, rows, half, tiles=triton_tree.tiles_for(rows, half))
    yield "tree 64 fp32 in one launch", tree(LARGE, 64, single, tiles=triton_tree.tiles_for(64, single))
    yield "tree 64 fp32", tree(LARGE, 64, single)
    yield "tree 64 small fp32", tree(SMALL, 64, single)
    yield "prefill", prefill(LARGE, half)
    yield "prefill fp32", prefill(LARGE, single)
