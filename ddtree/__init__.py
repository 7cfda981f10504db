"""Speculative decoding with draft trees: the target's own words, faster."""

import os

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "Request", "SamplingParams", "load_engine"]

# Before torch starts its threads: waiting ones sleep instead of spinning. On shared cores, and beside the server's own
# threads, spinning costs milliseconds per operation.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {
    "Engine": "ddtree.engine.engine",
    "EngineConfig": "ddtree.engine.config",
    "Request": "ddtree.engine.request",
    "SamplingParams": "ddtree.sampling.params",
    "load_engine": "ddtree.engine.loading",
}


def __getattr__(name: str):
    """The public names, imported when first used: `ddtree --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
