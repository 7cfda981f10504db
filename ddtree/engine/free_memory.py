"""How much memory can still be had, on a device or on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # on a CPU it is not needed
    import torch


def free_memory(device: torch.device | Literal["cpu"]) -> int | None:
    """Bytes that can still be had on `device`; None where the system does not say."""
    if device != "cpu" and device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        # What the allocator holds and has not given out is as good as free.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return max(min(free, allowed - torch.cuda.memory_allocated(device)), 0)
    info = Path("/proc/meminfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    if kib is None:
        return None
    room = _cgroup_room()
    return 1024 * kib if room is None else min(1024 * kib, room)


def keep_to(device: torch.device, share: float) -> None:
    """Let this process have no more than `share` of the device's memory. ValueError on a CPU, which has no such limit."""
    if device.type != "cuda":
        raise ValueError(f"--gpu-memory-fraction {share} is for a GPU, and the device is {device}: leave it out")
    import torch

    torch.cuda.set_per_process_memory_fraction(share, device)


def _cgroup_room() -> int | None:
    """What a container's limit leaves; None without one."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return max(int(limit.read_text()) - int(used.read_text()), 0)
    except (OSError, ValueError):
        return None
