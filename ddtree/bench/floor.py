"""The floor: the least time that the bytes and FLOPs of a round allow on this machine, its ceilings measured.

A round reads every weight that its rows meet once, and the context's keys and values; it multiplies every row by those
weights. Whatever is cached, fused or overlapped, it takes no less than the greater of bytes / bandwidth and
FLOPs / FLOP rate; drafter and target follow one another. Activations, sampling and the host are left out: it is a bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ddtree.engine.engine import Engine

COPY_BYTES = 256 << 20
MATMUL_WIDTH = {"cpu": 1536, "cuda": 8192}
TRIES = 5


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached once, with nothing else to do."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """What one forward over one row needs at the least."""

    weight_bytes: float  # read once, whatever the number of rows
    row_flops: float  # per row
    context_bytes: float  # per committed token
    state_bytes: float  # recurrent states, whatever the context
    attention_flops: float  # per row and committed token


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of a few big copies and matrix products."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    copy_s = _best(lambda: copy.copy_(source), device)
    width = MATMUL_WIDTH.get(device.type, 2048)
    left = torch.ones(width, width, device=device, dtype=dtype)
    matmul_s = _best(lambda: left @ left, device)
    # A copy reads and writes each byte.
    return Ceilings(2 * COPY_BYTES / copy_s, 2 * width**3 / matmul_s)


def round_floor_s(
    engine: Engine, ceilings: Ceilings, num_nodes: float, context: float, drafts: bool
) -> float:
    """Seconds that a round with `num_nodes` drafted nodes after `context` tokens cannot be faster than."""
    target = target_work(engine.target.model)
    seconds = _least(target, ceilings, 1 + num_nodes, context)
    if drafts:
        seconds += _least(
            drafter_work(engine.drafter.model, engine.target.model), ceilings, engine.block_size, context
        )
    return seconds


def target_work(model) -> Work:
    """Of a target: all layers and the head."""
    config = model.config
    experts = config.moe
    weight_bytes = values = 0.0
    for name, parameter in model.named_parameters():
        if name == "embed_tokens" and not config.tie_word_embeddings:
            continue  # of the embedding only the rows of the tokens are read
        is_experts = experts is not None and parameter.ndim == 3 and parameter.shape[0] == experts.num_experts
        share = experts.experts_per_token / experts.num_experts if is_experts else 1.0
        weight_bytes += share * parameter.nbytes
        values += share * parameter.numel() * (parameter.ndim > 1)
    linear = config.linear_attention
    num_full = sum(kind == "full_attention" for kind in config.layer_types) if linear else config.num_layers
    state = 0 if linear is None else linear.num_value_heads * linear.key_dim * linear.value_dim
    return Work(
        weight_bytes=weight_bytes,
        row_flops=2 * values,
        context_bytes=num_full * 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize,
        state_bytes=(config.num_layers - num_full) * state * model.dtype.itemsize,
        attention_flops=4 * num_full * config.num_heads * config.head_dim,
    )


def drafter_work(drafter, target_model) -> Work:
    """Of a drafter, with the head that it borrows."""
    config = drafter.config
    own = list(drafter.parameters())
    head = [] if drafter.lm_head is not None else [target_model.lm_head.weight]
    num_layers = len(drafter.layers)
    return Work(
        weight_bytes=sum(parameter.nbytes for parameter in own + head),
        row_flops=2.0 * sum(parameter.numel() for parameter in own + head if parameter.ndim > 1),
        context_bytes=num_layers * 2 * config.num_kv_heads * config.head_dim * drafter.dtype.itemsize,
        state_bytes=0,
        attention_flops=4 * num_layers * config.num_heads * config.head_dim,
    )


def _least(work: Work, ceilings: Ceilings, rows: float, context: float) -> float:
    num_bytes = work.weight_bytes + work.context_bytes * context + work.state_bytes
    flops = rows * (work.row_flops + work.attention_flops * context)
    return max(num_bytes / ceilings.bytes_per_s, flops / ceilings.flops_per_s)


def _best(work, device: torch.device) -> float:
    times = []
    for _ in range(TRIES):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)
