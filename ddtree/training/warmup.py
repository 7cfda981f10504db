"""Which attention and whether compiled: decided on the device by trying, since a failure there must not end a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ddtree.training.config import TrainingConfig
from ddtree.training.data import Data
from ddtree.training.features import DenseTarget
from ddtree.training.packed import PackedDrafter, initialise, new_drafter

WARM_STEPS, TIMED_STEPS = 3, 4
SLOW_STEP_S = 6.0  # once compiled, a step takes a tenth of a second
CLOSE = 0.03  # relative difference of two variants' hidden states, both in bfloat16


def settle(target: DenseTarget, data: Data, config: TrainingConfig, log: Callable, make: Callable) -> PackedDrafter:
    """The fastest variant that runs and agrees with the plain one.

    `make` is `Trainer`. On the CPU nothing is tried: it is what the config asks for.
    """
    drafter = new_drafter(target, config)
    if target.device.type != "cuda":
        attention = "sdpa" if config.attention == "auto" else config.attention
        return PackedDrafter(drafter, target, attention, config.compile == "on")
    best = PackedDrafter(drafter, target)
    best_ms, loss, plain_hidden = attempt(best, data, config, make)
    log(f"sdpa: {best_ms:.0f} ms/step, loss {loss:.3f}", variant="sdpa", step_ms=best_ms)
    for attention in ("flex", "sdpa"):
        if config.compile == "off" or config.attention not in ("auto", attention):
            continue
        name, begun = f"{attention} compiled", time.monotonic()
        try:
            packed = PackedDrafter(drafter, target, attention, compiled=True)
            step_ms, loss, hidden = attempt(packed, data, config, make)
        except Exception as failure:  # whatever the compiler raises, the plain variant still trains
            log(f"{name} unusable: {type(failure).__name__}: {str(failure).strip()[:300]}", variant=name)
            drafter.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            continue
        warm_s, error = time.monotonic() - begun, ((hidden - plain_hidden).norm() / plain_hidden.norm()).item()
        log(f"{name}: {step_ms:.0f} ms/step, loss {loss:.3f}, differs by {error:.4f}, {warm_s:.0f} s to warm up",
            variant=name, step_ms=step_ms, error=error)  # fmt: skip
        if error < CLOSE and step_ms < best_ms:
            best, best_ms = packed, step_ms
            break
    log(f"using {best.name}", variant=best.name)
    return best


def attempt(
    packed: PackedDrafter, data: Data, config: TrainingConfig, make: Callable
) -> tuple[float, float, torch.Tensor]:
    """Milliseconds per step, every length counted alike; the last loss; hidden states to compare variants by."""
    trainer = make(packed, data, replace(config, optimizer="adamw", learning_rate=1e-4))
    seconds, loss = [], None
    for length in data.lengths:
        for index in range(WARM_STEPS + TIMED_STEPS):
            rng = np.random.default_rng((5, index))
            torch.cuda.synchronize()
            begun = time.monotonic()
            loss = trainer.loss(data.batch_of_length(length, rng, config.tokens_per_step), rng)
            loss.backward()
            trainer.optimizer.step(1e-4)
            torch.cuda.synchronize()
            elapsed = time.monotonic() - begun
            if index and elapsed > SLOW_STEP_S:
                raise RuntimeError(f"a step takes {elapsed:.0f} s: it is compiled anew each time")
            if index >= WARM_STEPS:
                seconds.append(elapsed)
    return 1e3 * float(np.mean(seconds)), loss.item(), probe(packed, data, config, trainer)


def probe(packed: PackedDrafter, data: Data, config: TrainingConfig, trainer) -> torch.Tensor:
    """Hidden states of one fixed batch under fresh weights whose attention weighs heavily, so that a wrong mask shows."""
    initialise(packed.drafter, packed.target, config.seed)
    with torch.no_grad():
        for layer in packed.drafter.layers:
            layer.o_proj.weight.mul_(20.0)
    rng = np.random.default_rng(11)
    batch = data.batch_of_length(data.lengths[0], rng, config.tokens_per_step)
    # gradients stay on: without them the forward would be compiled anew
    return packed(packed.target.features(batch.tokens, config.target_layer_ids), trainer.draw_blocks(batch, rng)).detach()
