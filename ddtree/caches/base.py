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

    @property
    def row_bytes(self) -> int:
        """Bytes that each committed or staged row takes; 0 where memory does not grow with the context."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes that it takes whatever the context; 0 where there is no state beside the rows."""
        ...

    def reserve(self, num_rows: int) -> None:
        """Make room for exactly `num_rows` rows, committed and staged, unless there is more already."""
        ...

    def copy_rows(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Copies of the committed rows start ... stop - 1, [.., n, D] each; () where no rows are kept."""
        ...

    def copy_state(self) -> tuple[torch.Tensor, ...]:
        """Copies of what the committed tokens have become; () where the rows say it all."""
        ...

    def restore(self, rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...], num_rows: int) -> None:
        """Take `num_rows` tokens that were committed elsewhere behind those already here: their rows, and the state
        after the last of them. Nothing may be staged."""
        ...
