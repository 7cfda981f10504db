"""What a number depends on besides the code: the device, the memory, the versions."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ddtree import __version__

LIBRARIES = ("torch", "triton", "transformers", "numpy")


def device_name(device: torch.device) -> str:
    """The card, or the processor with its cores and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def versions() -> dict:
    """Of ddtree and of what it computes with."""
    found = {"ddtree": __version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.cuda.is_available() else {})


def memory(device: torch.device) -> dict:
    """The most that was in use, in bytes."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        peak["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return peak
