"""ModelCache: everything one sequence remembers in one model, one cache per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddtree.caches.base import Cache


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
