"""The sampled shards in memory: training batches and the sequences held out for evaluation.

Letters: S sequences, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

HELD_OUT_SHARE = 0.01


@dataclass(frozen=True, eq=False)
class Shard:
    """Sequences of one length."""

    tokens: np.ndarray  # [S, T] uint16
    classes: np.ndarray  # [S, T] uint8, see `sample`
    temperatures: np.ndarray  # [S] float32


@dataclass(frozen=True, eq=False)
class Batch:
    tokens: torch.Tensor  # [S, T] int64
    classes: torch.Tensor  # [S, T] uint8


class Data:
    """All shards of a folder; the last hundredth of each shard's sequences is held out."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self.train: list[Shard] = []
        self.held_out: list[Shard] = []
        for path in sorted(folder.glob("classes_*.npy")):
            arrays = [np.load(path.with_name(path.name.replace("classes", kind))) for kind in ("tokens", "classes", "temperatures")]
            cut = len(arrays[0]) - max(1, round(len(arrays[0]) * HELD_OUT_SHARE))
            if cut < 1:
                continue
            self.train.append(Shard(*(array[:cut] for array in arrays)))
            self.held_out.append(Shard(*(array[cut:] for array in arrays)))
        if not self.train:
            raise ValueError(f"{folder}: no shards classes_*.npy with at least two sequences; run `sample` first")
        sizes = np.array([shard.tokens.size for shard in self.train], dtype=np.float64)
        self.shares = sizes / sizes.sum()
        self.num_tokens = int(sizes.sum())

    @property
    def lengths(self) -> list[int]:
        """The sequence lengths that occur, ascending."""
        return sorted({shard.tokens.shape[1] for shard in self.train})

    def batch(self, rng: np.random.Generator, num_tokens: int) -> Batch:
        """Random sequences of one shard, as many as fill `num_tokens`."""
        shard = self.train[rng.choice(len(self.train), p=self.shares)]
        return self.batch_of(shard, rng.integers(len(shard.tokens), size=sequences_per_step(num_tokens, shard.tokens.shape[1])))

    def batch_of_length(self, length: int, rng: np.random.Generator, num_tokens: int) -> Batch:
        """The same from a shard of this length."""
        shard = next(shard for shard in self.train if shard.tokens.shape[1] == length)
        return self.batch_of(shard, rng.integers(len(shard.tokens), size=sequences_per_step(num_tokens, length)))

    def batch_of(self, shard: Shard, rows: np.ndarray) -> Batch:
        tokens = torch.from_numpy(shard.tokens[rows].astype(np.int64))
        classes = torch.from_numpy(shard.classes[rows])
        if self.device.type == "cuda":
            tokens, classes = tokens.pin_memory(), classes.pin_memory()
        return Batch(tokens.to(self.device, non_blocking=True), classes.to(self.device, non_blocking=True))


def sequences_per_step(num_tokens: int, length: int) -> int:
    return max(1, num_tokens // length)
