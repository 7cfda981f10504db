"""A finished run's JSON, from known times."""

from __future__ import annotations

from ddtree.bench.pooled import summarise
from tests.bench.outputs import drafted, plain


def finished(factor: float = 1.0, jitter: float = 0.02, **changes) -> dict:
    """Trees of 4, 8 and 16 nodes and a chain on five prompts; `factor` slows everything that drafts."""
    outputs = []
    for number in range(5):
        for passed in range(3):
            slow = 1 + jitter * (passed - 1)
            outputs.append(plain(f"p{number}", e2e_s=0.5 + 3.9 * slow))
            for config, seconds in (("chain", 2.6), ("4", 2.2), ("8", 1.9), ("16", 2.4)):
                e2e_s = 0.5 + seconds * slow * factor
                outputs.append(
                    drafted(config, f"p{number}", e2e_s=e2e_s, stage_s={"draft": 0.1, "verify": 1.0})
                )
    result = {
        "refused": False,
        "reasons": [],
        "model": "toy <b>",
        "drafter": "toy-dflash",
        "dtype": "float32",
        "device": "a machine",
        "thinking": "off",
        "temperature": 0.0,
        "seed": 0,
        "eos_policy": "honoured",
        "max_tokens": 40,
        "items": 5,
        "timed_items": 5,
        "excluded": {},
        "forced_past_their_end": {},
        "near_ties": [],
        "prompt_tokens": {"median": 10, "p5": 10, "p95": 10},
        "output_tokens": {"median": 40, "p5": 40, "p95": 40},
        "repeats": 3,
        "block_size": 8,
        "concurrency": 1,
        "command": "ddtree bench toy",
        "predicted": {
            "0": {"speedup": 1},
            "4": {"speedup": 1.8},
            "8": {"speedup": 2.0},
            "16": {"speedup": 1.7},
        },
        "configs": summarise(outputs),
    }
    return result | changes
