"""From checkpoints to an engine, every mismatch an error before anything is served (contract.md, Loading)."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ddtree.engine.config import EngineConfig
from ddtree.engine.drafter import Drafter
from ddtree.engine.engine import Engine
from ddtree.engine.free_memory import free_memory
from ddtree.engine.memory import Memory, cache_size
from ddtree.engine.pooled import pooled_engine, tokens_that_fit
from ddtree.engine.target import Target
from ddtree.models.adapter_files import find_adapter, load_adapter, read_about
from ddtree.models.conditioning import Conditioning
from ddtree.models.dflash import load_drafter
from ddtree.models.pooled_target import unsupported
from ddtree.models.registry import load_target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SINGLE_THREADED = 30_000_000  # parameters up to which one thread serves a CPU
ROWS_EACH = 32  # that a round over pools may verify per sequence when all that may run do
PREFILL_CHUNK = 2048  # prompt tokens of a step over pools, where few rows leave the device idle
_threads_before = 0  # what a small model took away, for a larger one loaded after it


def pick_device(name: str = "auto") -> torch.device:
    """`auto` takes the GPU if there is one. ValueError for a device this machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this machine has no CUDA device; use cpu or auto")
    if device.type == "cuda" and device.index is None:
        # Memory is asked for by index.
        return torch.device("cuda", torch.cuda.current_device())
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU, where bfloat16 is emulated and slower."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def settle_threads(num_parameters: int) -> None:
    """One thread for a small model, what there was for others; an `OMP_NUM_THREADS` of the user's own is left alone.

    A small model's operations take microseconds. A second thread hardly shortens them, and where another process has its core each
    one waits for the scheduler: rounds of 50 ms were seen to take 1.5 s.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    global _threads_before
    if num_parameters <= SINGLE_THREADED:
        _threads_before = max(_threads_before, torch.get_num_threads())
        torch.set_num_threads(1)
    elif _threads_before and torch.get_num_threads() == 1:
        torch.set_num_threads(_threads_before)


def load_conditioning(adapter: str | Path, drafter_path: Path | None, drafter_model, model) -> Conditioning | None:
    """The adapter of a drafter, bound to its target; None where there is none, or "none" is wanted.

    Raises ValueError where one is named that is not there, does not fit, or has no drafter.
    """
    if str(adapter) == "none" or (str(adapter) == "auto" and drafter_path is None):
        return None
    if drafter_path is None:
        raise ValueError(f"adapter {adapter} needs its drafter, and none is loaded: name one, or leave the adapter out")
    folder = find_adapter(Path(drafter_path)) if str(adapter) == "auto" else Path(adapter)
    if folder is None:
        return None
    loaded = load_adapter(folder, Path(drafter_path), drafter_model.config, model.device, model.dtype)
    # A lookup is cheap where a product is not: few tokens a round on a CPU, many on a GPU.
    conditioning = Conditioning(loaded, model, tables=model.device.type != "cpu")
    conditioning.acceptance = read_about(folder).get("acceptance")
    return conditioning


def load_engine(
    target_path: Path,
    drafter_path: Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_context: int | None = None,
    max_tree_budget: int = 1024,
    max_running: int = 1,
    cuda_graphs: bool = True,
    adapter: str | Path = "auto",
    cache_bytes: int | None = 0,
    prefix_bytes: int | None = 0,
    batch_invariant: bool = False,
    **limits: float,
) -> Engine:
    """Load a target and its drafter. `max_context` defaults to what the target was made for, in tokens; to what fits if that
    is less, on a GPU, where caches are pools of fixed size, and under `cache_bytes`. `limits` are those of `EngineConfig`;
    `adapter`: a folder, "none", or "auto" for the one beside the drafter, if there is one.
    `cache_bytes` None is half of the memory that is free after loading, `prefix_bytes` None half of that; what they are of pools
    says `share_out`.

    Raises ValueError where the two do not fit, naming both sides, where `max_context` is more than the model has, or where there
    is no `batch_invariant` form of it.
    """
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    if batch_invariant and place.type != "cuda":
        raise ValueError(
            f"batch_invariant is for the engine of a GPU, this one runs on {place}: leave it out; in float32 on a CPU tokens "
            "depend on company at near ties alone"
        )
    model = load_target(Path(target_path), place, kind)
    if place.type == "cpu":
        settle_threads(sum(parameter.numel() for parameter in model.parameters()))
    limit, asked = model.config.context_limit, max_context
    if max_context is None:
        max_context = limit
    elif not 1 < max_context <= limit:
        raise ValueError(f"max_context must lie in 2 ... {limit} (what the model was made for), got {max_context}")
    drafter_model = None
    if drafter_path is not None:
        drafter_model = load_drafter(Path(drafter_path), model.config, place, kind)
    conditioning = load_conditioning(adapter, drafter_path, drafter_model, model)
    limits |= {"max_tree_budget": max_tree_budget, "max_running": max_running, "batch_invariant": batch_invariant}
    if place.type == "cuda" and unsupported(model) is None:
        limits.setdefault("prefill_chunk", PREFILL_CHUNK)
        max_rows = max(1 + max_tree_budget, ROWS_EACH * max_running)
        fitting = tokens_that_fit(model, drafter_model, max_running, max_rows, batch_invariant=batch_invariant)
        row_bytes = sum(each.new_cache().size.row_bytes for each in (model, drafter_model) if each is not None)
        tokens, prefix_bytes = share_out(fitting, row_bytes, max_running * max_context, cache_bytes, prefix_bytes)
        if tokens < max_context and asked is not None:
            raise ValueError(f"max_context {max_context} tokens do not fit into this GPU's memory beside the weights; {tokens} do")
        config = EngineConfig(max_context=min(max_context, tokens), prefix_bytes=prefix_bytes, **limits)
        return pooled_engine(
            model, drafter_model, config, num_tokens=tokens, max_rows=max_rows, graphs=cuda_graphs, conditioning=conditioning
        )
    if batch_invariant:
        raise ValueError(f"batch_invariant: {unsupported(model)}; leave it out")
    drafter = Drafter(drafter_model, model, conditioning) if drafter_model is not None else None
    layers = drafter_model.config.target_layer_ids if drafter_model is not None else ()
    target = Target(model, layers)
    if cache_bytes is None:
        cache_bytes = (free_memory(place) or 0) // 2  # no limit where nobody knows
    if cache_bytes:
        tokens = Memory(cache_size(target, drafter), cache_bytes).most_tokens
        if tokens < max_context and asked is not None:
            raise ValueError(f"max_context {max_context} tokens do not fit into {cache_bytes} bytes of cache memory; {tokens} do")
        max_context = min(max_context, tokens)
    prefix_bytes = cache_bytes // 2 if prefix_bytes is None else prefix_bytes
    config = EngineConfig(max_context=max_context, cache_bytes=cache_bytes, prefix_bytes=prefix_bytes, **limits)
    return Engine(target, drafter, config, model.config.vocab_size)


def share_out(
    fitting: int, row_bytes: int, most_needed: int, cache_bytes: int | None, prefix_bytes: int | None
) -> tuple[int, int]:
    """Of pools: tokens that they are made for, and bytes of them that prefixes may be remembered in.

    `fitting` tokens of `row_bytes` would fit into the device, all that may run side by side have `most_needed`. By default
    the pools hold those, and as much again where prefixes are remembered, as far as it fits. ValueError for more than fits.
    """
    if cache_bytes and cache_bytes // row_bytes > fitting:
        raise ValueError(
            f"{cache_bytes / 2**30:.2f} GiB of cache memory do not fit beside the weights: "
            f"{fitting * row_bytes / 2**30:.2f} GiB do"
        )
    wanted = cache_bytes // row_bytes if cache_bytes else most_needed * (1 if prefix_bytes == 0 else 2)
    tokens = min(fitting, wanted)
    return tokens, tokens * row_bytes // 2 if prefix_bytes is None else prefix_bytes
