"""What fits into memory: weights, drafter, and how long a context beside them. An estimate from shapes, before loading.

Letters: a value is one number of a tensor; memory in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from ddtree.doctor.checks import FAILED, OK, WARNING, Check
from ddtree.engine.free_memory import free_memory as bytes_free

AREA = "memory"
HEADROOM = 0.9  # of what is free; the rest is for activations, graphs and the allocator
FULL = "full_attention"
GIB = 2**30


def memory_checks(device: torch.device, dtype: torch.dtype, target, shapes, drafter, drafter_shapes, max_context) -> Iterator[Check]:
    """Weights against what is free, then the context that the rest has room for."""
    free, place = free_memory(device)
    if free is None:
        yield Check(AREA, "free", WARNING, f"unknown on {place}", "watch the memory yourself")
        return
    weights, drafter_weights = weight_bytes(shapes, dtype), weight_bytes(drafter_shapes, dtype)
    room = HEADROOM * free - weights - drafter_weights - state_bytes(target)
    sizes = f"target {gib(weights)}, drafter {gib(drafter_weights)}; {gib(free)} free on {place}"
    if room <= 0:
        yield Check(AREA, "weights", FAILED, sizes, smaller(dtype, device))
        return
    yield Check(AREA, "weights", OK, sizes)
    per_token = kv_bytes(target, dtype) + (0 if drafter is None else drafter_kv_bytes(drafter, dtype))
    limit, fits = max_context or target.context_limit, int(room // max(per_token, 1))
    found = f"{per_token / 1024:.1f} KiB a token; {min(fits, 10**7):,} tokens fit, one sequence has up to {limit:,}"
    if fits < limit:
        yield Check(AREA, "context", WARNING, found, f"serve with --max-context {max(fits, 2)}")
    else:
        yield Check(AREA, "context", OK, f"{found}: {fits // limit} such sequences side by side")


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Of all tensors of a checkpoint in `dtype`."""
    return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize


def kv_bytes(config, dtype: torch.dtype) -> int:
    """Per token, all layers with full attention."""
    full = sum(kind == FULL for kind in config.layer_types) if config.layer_types else config.num_layers
    return full * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def drafter_kv_bytes(config, dtype: torch.dtype) -> int:
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def state_bytes(config) -> int:
    """Recurrent states in fp32, whatever the context."""
    linear = config.linear_attention
    if linear is None:
        return 0
    layers = sum(kind != FULL for kind in config.layer_types)
    return layers * 4 * (linear.num_value_heads * linear.key_dim * linear.value_dim + linear.conv_width * linear.conv_channels)


def free_memory(device: torch.device) -> tuple[int | None, str]:
    """Bytes that can still be had on `device`, and what it is called."""
    return bytes_free(device), str(device) if device.type == "cuda" else "this machine"


def smaller(dtype: torch.dtype, device: torch.device) -> str:
    """What to try where the weights do not fit."""
    halve = "--dtype bfloat16, " if dtype == torch.float32 else ""
    return f"try {halve}another --device, or a smaller model; {device} cannot hold this one"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
