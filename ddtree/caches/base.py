"""The one protocol of everything a sequence remembers: stage rows, then commit a path.

`commit(path)` is the only way anything becomes permanent. There is no trim, crop or rewind; abort is
`commit([])`.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Cache(Protocol):
    """One layer's memory of one sequence. Each layer kind has its own `stage(...)` arguments."""

    def commit(self, path: torch.Tensor) -> None:
        """Make the staged rows `path` ([n] int64 on the device, root first) permanent in that order and drop
        the others. An empty path drops everything staged."""
        ...

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory held."""
        ...
