"""Checkpoint tensors -> parameters: every tensor used exactly once, or an error that names it.

`fill` is shared by all models and both formats; a source says which tensors there are and reads one at a time, so
that no second copy of the model is ever in memory.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)

# Published with some checkpoints although they follow from the config.
TOLERATED_SUFFIXES = ("rotary_emb.inv_freq",)
_NUM_READERS = min(4, os.cpu_count() or 1)
_NO_DUPLICATES: Mapping[str, str] = {}


class TensorSource(Protocol):
    """Named tensors of one checkpoint."""

    name: str  # for messages
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored (dequantised if need be), on the CPU."""
        ...


class SafetensorsSource:
    """All tensors of a folder's `.safetensors` files, or of one such file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = {}
        for file in _safetensors_files(path):
            header = _read_header(file)
            handle = safe_open(file, framework="pt", device="cpu")
            for tensor_name, entry in header.items():
                if tensor_name in self._files:
                    raise ValueError(f"{file}: {tensor_name} is in another shard of this checkpoint too")
                self._files[tensor_name] = handle
                self.shapes[tensor_name] = tuple(entry["shape"])

    def read(self, name: str) -> torch.Tensor:
        """The tensor, mapped from the file."""
        return self._files[name].get_tensor(name)


def fill(
    destinations: Iterable[tuple[str, torch.Tensor]],
    source: TensorSource,
    duplicates: Mapping[str, str] = _NO_DUPLICATES,
) -> None:
    """Copy each tensor of `source` into the destination of its name, converting device and dtype.

    `duplicates` maps names that may also be there to the tensor they must equal (a tied head to the embedding).
    ValueError names a tensor that is missing, left over, of the wrong shape, or not the duplicate it should be.
    """
    targets = dict(destinations)
    for name, target in targets.items():
        if name not in source.shapes:
            raise ValueError(f"{name}: missing from {source.name}, expected {list(target.shape)}")
        if source.shapes[name] != tuple(target.shape):
            raise ValueError(
                f"{name}: expected {list(target.shape)}, checkpoint has {list(source.shapes[name])} ({source.name})"
            )
    for name in source.shapes:
        if name in targets:
            continue
        if name in duplicates:
            if not torch.equal(source.read(name), source.read(duplicates[name])):
                raise ValueError(
                    f"{name}: the config ties it to {duplicates[name]}, but {source.name} has other values"
                )
        elif not name.endswith(TOLERATED_SUFFIXES):
            raise ValueError(f"{name}: in {source.name}, but the model has no such tensor")
        logger.info("%s: not used, it follows from %s", name, duplicates.get(name, "the config"))
    # Threads, since reading is page faults and dequantisation; each holds one tensor at a time.
    with ThreadPoolExecutor(max_workers=_NUM_READERS) as pool:
        copies = pool.map(lambda item: item[1].copy_(source.read(item[0])), targets.items())
        for _ in copies:
            pass


def _safetensors_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file}: missing, but {index.name} lists it; download the checkpoint again")
        return files
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ValueError(
            f"{path}: {len(found)} safetensors files but no {index.name}; download the index as well"
        )
    if any(path.glob("*.bin")):
        raise ValueError(
            f"{path}: only .bin (pickle) weights, which can run code when loaded and are not read; convert them with "
            "transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise ValueError(f"{path}: no .safetensors file; download the weights")


def _read_header(file: Path) -> dict[str, dict]:
    """The tensor entries of a safetensors file, after checking that the file is as long as they say."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        raw = stream.read(header_size) if 8 + header_size <= size else b""
    if not raw:
        raise ValueError(
            f"{file}: truncated or not a safetensors file: {size} bytes, its header alone should end at byte "
            f"{8 + header_size}; download it again"
        )
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        expected = 8 + header_size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a safetensors file: {error}; download it again") from error
    if size != expected:
        raise ValueError(f"{file}: expected {expected} bytes, the file has {size}; download it again")
    try:
        with safe_open(file, framework="pt", device="cpu"):
            return header
    except SafetensorError as error:
        raise ValueError(f"{file}: not a safetensors file: {error}; download it again") from error
