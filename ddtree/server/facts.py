"""What a warm engine tells the server about itself."""

from __future__ import annotations

import resource
import sys

from ddtree.server.batch import Facts


def facts_of(engine, default_tree_budget: int | str) -> Facts:
    """The facts of an engine.engine.Engine."""
    model, config = engine.target.model, engine.config
    # "cuda" and "cuda:0" are the same place; the parameters know which.
    device = engine.target.device
    caches = getattr(engine, "memory_facts", dict)
    return Facts(
        max_context=config.max_context,
        vocab_size=engine.vocab_size,
        default_tree_budget=default_tree_budget,
        max_tree_budget=config.max_tree_budget,
        block_size=engine.block_size,
        scoring=getattr(engine, "scoring", None),
        device=str(device),
        dtype=str(model.dtype).removeprefix("torch."),
        batch_invariant=config.batch_invariant,
        memory=lambda: memory_of(device) | caches(),
        cache_use=lambda: engine.cache_use,
    )


def memory_of(device) -> dict:
    """Memory of the process, and of the GPU if there is one. In bytes."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    memory: dict = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        memory |= {"gpu_used_bytes": total - free, "gpu_total_bytes": total}
    return memory
