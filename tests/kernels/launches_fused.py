"""Launches of the row-wise steps at true shapes, for `tests.kernels.compiling`."""

from __future__ import annotations

import torch

from ddtree.kernels.fused import triton as fused
from ddtree.kernels.qk_rotary.triton import qk_rotary_pooled_triton

BFLOAT16 = torch.bfloat16


def rotary(heads, kv_heads, head_dim, rotary_dim, kind):
    def launch() -> None:
        pages = [torch.empty(4, 64, kv_heads, head_dim, dtype=BFLOAT16) for _ in range(2)]
        projected = torch.empty(2, heads + 2 * kv_heads, head_dim, dtype=BFLOAT16)
        sizes = torch.zeros(2, dtype=torch.int32)
        frequencies = torch.empty(rotary_dim)
        scale = None if kind is None else torch.empty(heads + kv_heads, head_dim)
        query = torch.empty(2, heads, head_dim, dtype=BFLOAT16)
        table = torch.zeros(4, 16, dtype=torch.int32)
        qk_rotary_pooled_triton(
            projected, sizes, frequencies, frequencies, 1.0, scale, kind, 1e-6, *pages, table, sizes, sizes, sizes, query
        )  # fmt: skip

    return launch


def rows(*shape: int) -> torch.Tensor:
    return torch.empty(2, *shape, dtype=BFLOAT16)


def launches():
    yield "norm", lambda: fused.rms_norm_triton(rows(5120), torch.empty(5120), 1e-6, "zero_centred")
    yield "swiglu", lambda: fused.swiglu_triton(rows(2 * 17408))
    yield "gate heads", lambda: fused.gate_heads_triton(rows(24, 256), rows(24, 256))
    yield "norm and gate", lambda: fused.norm_and_gate_triton(rows(48, 128), rows(48, 128), torch.empty(128), 1e-6)
    yield "argmax", lambda: fused.argmax_triton(rows(248_320))
    yield "27B rotary", rotary(24, 4, 256, 64, "zero_centred")
    yield "drafter rotary", rotary(32, 8, 128, 128, "plain")
    yield "SmolLM2 rotary", rotary(9, 3, 64, 64, None)
