"""ModelCache: everything one sequence remembers in one model, one cache per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddtree.caches.base import Cache
from ddtree.caches.saved import CacheSize, SavedRows, SavedState


class ModelCache:
    """The layers' caches, committed together. `layers[i]` is what layer i stages into."""

    def __init__(self, layers: Sequence[Cache]) -> None:
        self.layers = tuple(layers)
        self._context_length = 0

    @property
    def context_length(self) -> int:
        """Committed tokens."""
        return self._context_length

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory held by all layers."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def size(self) -> CacheSize:
        """What a token, and a sequence beside its tokens, take."""
        return CacheSize(
            sum(layer.row_bytes for layer in self.layers), sum(layer.state_bytes for layer in self.layers)
        )

    def reserve(self, num_rows: int) -> None:
        """Make room for exactly `num_rows` rows, committed and staged, in every layer."""
        for layer in self.layers:
            layer.reserve(num_rows)

    def copy_rows(self, start: int, stop: int) -> SavedRows:
        """Copies of what the layers keep of the committed tokens start ... stop - 1."""
        return SavedRows(stop - start, tuple(layer.copy_rows(start, stop) for layer in self.layers))

    def copy_state(self) -> SavedState:
        """Copies of what the committed tokens have become in layers that keep no rows."""
        return SavedState(tuple(layer.copy_state() for layer in self.layers))

    def restore(self, segments: Sequence[SavedRows], state: SavedState) -> None:
        """Begin with tokens committed elsewhere: their rows in order, and the state after the last of them."""
        assert self._context_length == 0, "only an empty cache can take over what another remembers"
        for segment in segments:
            # The state belongs to the last token; setting it with every segment costs little and asks for no order.
            for layer, rows, own in zip(self.layers, segment.layers, state.layers, strict=True):
                layer.restore(rows, own, segment.num_rows)
            self._context_length += segment.num_rows

    def commit(self, path: torch.Tensor) -> None:
        """Make the rows `path` ([p] int64 on the device, root first, ascending) permanent in every layer; an empty
        path aborts the round.
        """
        if path.device.type == "cpu" and len(path) > 0:
            indices = path.tolist()
            assert indices[0] == 0 and all(a < b for a, b in zip(indices, indices[1:], strict=False)), (
                f"a path starts at the root and ascends, got {indices}"
            )
        for layer in self.layers:
            layer.commit(path)
        self._context_length += len(path)

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        for layer in self.layers:
            layer.reset()
        self._context_length = 0
