"""GgufFile: the header of a GGUF file, and its tensors dequantised one at a time.

The header is parsed here because `gguf.GGUFReader` makes several NumPy arrays per vocabulary entry, which takes
seconds; block sizes and dequantisation are the `gguf` package's.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies and how it is stored."""

    shape: tuple[int, ...]  # slowest dimension first, the reverse of the file's order
    quantization: GGMLQuantizationType
    start: int  # byte offset in the file
    num_bytes: int


class GgufFile:
    """Metadata and tensors of one GGUF file. ValueError when the file is not GGUF, or shorter than it says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r") if self._size else np.empty(0, np.uint8)
        magic = bytes(self._bytes[:4])
        if magic != _MAGIC:
            raise ValueError(
                f"{path}: expected magic {_MAGIC!r}, the file ({self._size} bytes) starts with {magic!r}; "
                "give a .gguf file, or download it again"
            )
        try:
            self._parse(_Cursor(memoryview(self._bytes), 4))
        except (struct.error, IndexError, KeyError) as error:
            raise ValueError(
                f"{path}: the header is cut off or damaged, the file has {self._size} bytes; download it again"
            ) from error

    def need(self, key: str) -> Any:
        """The metadata value of `key`, or a ValueError that names it."""
        if key not in self.metadata:
            raise ValueError(f"{self.path}: {key} is missing from the metadata; it cannot be guessed")
        return self.metadata[key]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` dequantised to float32 on the CPU. ValueError for a quantisation that gguf cannot undo."""
        entry = self.tensors[name]
        raw = self._bytes[entry.start : entry.start + entry.num_bytes]
        rows = raw.reshape(*entry.shape[:-1], entry.num_bytes // math.prod(entry.shape[:-1]))
        try:
            values = dequantize(np.asarray(rows), entry.quantization)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: {name}: {entry.quantization.name} cannot be dequantised"
            ) from error
        # F32 tensors come back as a view of the read-only file.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _parse(self, cursor: _Cursor) -> None:
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(
                f"{self.path}: GGUF version {version} is not supported (2 and 3 are); convert it again"
            )
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        if self.metadata.get("split.count", 0) > 1:
            raise ValueError(
                f"{self.path}: split.count={self.metadata['split.count']}: merge the parts with gguf-split"
            )
        entries = []
        for _ in range(num_tensors):
            name = cursor.string()
            dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            entries.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {
            name: self._entry(name, shape, kind, data_start + offset) for name, shape, kind, offset in entries
        }

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise ValueError(
                f"{self.path}: {name}: unknown tensor type {kind}; update the gguf package"
            ) from error
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        num_bytes = math.prod(shape) // block * block_bytes
        if start + num_bytes > self._size:
            raise ValueError(
                f"{self.path}: {name} ends at byte {start + num_bytes}, but the file has {self._size}; download it again"
            )
        return GgufTensor(shape, quantization, start, num_bytes)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data, self.position = data, position

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._data, self.position)[0]
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self._take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, length = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[item])
            return np.frombuffer(self._take(length * dtype.itemsize), dtype)
        return [self.value(item) for _ in range(length)]

    def _take(self, num_bytes: int) -> bytes:
        if self.position + num_bytes > len(self._data):
            raise IndexError(num_bytes)
        taken = bytes(self._data[self.position : self.position + num_bytes])
        self.position += num_bytes
        return taken
