"""What one replica is started with, and a process that dies with its parent."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Launch:
    """One replica: its command, its environment, its Unix socket, and where it runs, in words."""

    command: Sequence[str]
    environment: Mapping[str, str]
    socket: Path
    place: str


@dataclass
class Replica:
    """A replica as the supervisor sees it. `state`: starting, ready, failing (its /health), restarting or stopped."""

    index: int
    launch: Launch
    process: asyncio.subprocess.Process | None = None
    state: str = "starting"
    restarts: int = 0
    was_ready: bool = False
    last_well: float = 0.0  # monotonic; when /health last said so, or the start

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None


async def spawn(command: Sequence[str], environment: Mapping[str, str], **options) -> asyncio.subprocess.Process:
    """A child in a session of its own, as Ctrl-C is the parent's to hear; killed with the parent, where Linux can."""
    return await asyncio.create_subprocess_exec(
        *command, env=dict(environment), start_new_session=True, preexec_fn=_die_with_parent, **options
    )


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
