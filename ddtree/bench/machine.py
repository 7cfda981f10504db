"""What a number depends on besides the code: the device, the memory, the versions, what else the machine did."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
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
    threads = torch.get_num_threads()
    return f"{name}, {os.cpu_count()} cores, {threads} thread{'' if threads == 1 else 's'}"


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


class Neighbours:
    """Use as a context: afterwards `cores` says how many cores others kept busy meanwhile; None where the system does not tell."""

    def __init__(self, stat: Path = Path("/proc/stat")):
        self._stat = stat
        self.cores: float | None = None

    def __enter__(self) -> Neighbours:
        self._before = self._read()
        return self

    def __exit__(self, *fault) -> None:
        if self._before is None:
            return
        busy, own, at = (after - before for after, before in zip(self._read(), self._before, strict=True))
        self.cores = round(max(busy - own, 0) / at, 2) if at else None

    def _read(self) -> tuple[float, float, float] | None:
        """Seconds: of all cores at work, of this process, of the clock."""
        try:
            ticks = [int(value) for value in self._stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return None
        # user nice system idle iowait irq softirq steal; guests are in user.
        busy = sum(ticks[:8]) - ticks[3] - ticks[4]
        own = os.times()
        return busy / os.sysconf("SC_CLK_TCK"), own.user + own.system, time.monotonic()
