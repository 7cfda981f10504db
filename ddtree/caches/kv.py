"""KVCache: keys and values of one attention layer of one sequence.

Letters: n staged rows, Hkv key/value heads, T = context length + n, D head dim.
The buffers hold the committed rows first and the staged rows right behind them, so attention reads one slice.
"""

from __future__ import annotations

import torch

INITIAL_CAPACITY = 256  # rows; doubles whenever it runs out


class KVCache:
    """Committed keys and values, and the rows staged by the round in flight."""

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        capacity: int = INITIAL_CAPACITY,
    ) -> None:
        self.context_length = 0
        self._num_staged = 0
        self._keys = _buffer(num_kv_heads, capacity, head_dim, dtype, device)
        self._values = _buffer(num_kv_heads, capacity, head_dim, dtype, device)

    @property
    def capacity(self) -> int:
        """Rows that fit before the buffers grow."""
        return self._keys.shape[1]

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // self.capacity

    @property
    def state_bytes(self) -> int:
        return 0

    def reserve(self, num_rows: int) -> None:
        """Make room for exactly `num_rows` rows, committed and staged, unless there is more already. An empty cache
        is also cut down to it, so that memory is what was asked for."""
        if num_rows > self.capacity or (self.context_length == 0 and num_rows > 0):
            self._resize(num_rows)

    def copy_rows(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the committed keys and values start ... stop - 1, [Hkv, n, D] each."""
        assert 0 <= start <= stop <= self.context_length, f"rows {start} ... {stop} of {self.context_length}"
        return self._keys[:, start:stop].clone(), self._values[:, start:stop].clone()

    def copy_state(self) -> tuple[torch.Tensor, ...]:
        return ()

    def restore(self, rows: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...], num_rows: int) -> None:
        """Put `rows` (keys and values, [Hkv, n, D]) behind the committed ones; they are committed at once."""
        start = self.context_length
        if start + num_rows > self.capacity:
            self._grow(start + num_rows)
        for buffer, saved in zip((self._keys, self._values), rows, strict=True):
            buffer[:, start : start + num_rows].copy_(saved)
        self.context_length, self._num_staged = start + num_rows, 0

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `keys` and `values` [n, Hkv, D] behind the committed rows; returns views [Hkv, T, D] of both.

        Staging again without a commit replaces what was staged, so a round that failed halfway leaves no trace.
        The views are valid until the next `stage` or `commit`.
        """
        start = self.context_length
        stop = start + keys.shape[0]
        if stop > self.capacity:
            self._grow(stop)
        self._num_staged = keys.shape[0]
        self._keys[:, start:stop].copy_(keys.transpose(0, 1))
        self._values[:, start:stop].copy_(values.transpose(0, 1))
        return self._keys[:, :stop], self._values[:, :stop]

    def commit(self, path: torch.Tensor) -> None:
        """Move the staged rows `path` ([p] int64, root first, hence ascending) to the front; drop the others."""
        length = path.shape[0]
        assert length <= self._num_staged, f"path of {length} rows, but {self._num_staged} are staged"
        # A path starts at row 0 and ascends, so a single row, or all of them, lie in place already. Decided by
        # shape: looking at the indices would wait for the device.
        if 1 < length < self._num_staged:
            start = self.context_length
            for buffer in (self._keys, self._values):
                staged = buffer[:, start : start + self._num_staged]
                # Source and destination overlap: gather first, then write.
                staged[:, :length] = staged.index_select(1, path)
        self.context_length += length
        self._num_staged = 0

    def reset(self) -> None:
        self.context_length = 0
        self._num_staged = 0

    def _grow(self, needed: int) -> None:
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        self._resize(capacity)

    def _resize(self, capacity: int) -> None:
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = _buffer(old.shape[0], capacity, old.shape[2], old.dtype, old.device)
            new[:, : self.context_length] = old[:, : self.context_length]
            setattr(self, name, new)


def _buffer(
    num_kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    # Allocated outside inference mode even when grown inside a forward: an inference tensor could not be
    # written to from ordinary code later.
    with torch.inference_mode(False):
        return torch.empty(num_kv_heads, capacity, head_dim, dtype=dtype, device=device)
