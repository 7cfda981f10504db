"""An adapter's files, in the folder `adapter` beside its drafter's checkpoint: `adapter.json`, `adapter.safetensors`, its card.

adapter.json holds the shape ("config"), the drafter that it was trained for ("drafter", a fingerprint) and, once measured,
its acceptance lengths ("acceptance": temperature -> budget -> length).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ddtree.models.adapter import Adapter, AdapterConfig, rename_former

FOLDER = "adapter"
CONFIG_FILE, WEIGHTS_FILE = "adapter.json", "adapter.safetensors"
FINGERPRINTED = 1 << 20  # bytes read of each end of a drafter's weights


def find_adapter(drafter: Path) -> Path | None:
    """The folder of the adapter that lies beside a drafter (its folder or file); None where there is none."""
    folder = (drafter if drafter.is_dir() else drafter.parent) / FOLDER
    return folder if (folder / CONFIG_FILE).is_file() else None


def fingerprint(drafter: Path) -> str:
    """What tells one drafter's weights from another's: a hash of their files' sizes, beginnings and ends."""
    folder = drafter if drafter.is_dir() else drafter.parent
    files = [drafter] if drafter.is_file() else sorted(f for s in ("*.safetensors", "*.gguf") for f in folder.glob(s))
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(FINGERPRINTED))
            file.seek(max(size - FINGERPRINTED, 0))
            digest.update(file.read(FINGERPRINTED))
    return digest.hexdigest()[:32]


def save_adapter(adapter: Adapter, folder: Path, drafter: Path, acceptance: Mapping[str, Any] | None = None) -> Path:
    """Write the adapter into `folder`, its matrices in bfloat16; returns the weights' path. Files replace older ones in one
    step each."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in adapter.state_dict().items()}
    about = {"config": adapter.config.as_json(), "drafter": fingerprint(drafter)}
    if acceptance:
        about["acceptance"] = dict(acceptance)
    partial = folder / (WEIGHTS_FILE + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS_FILE)
    partial = folder / (CONFIG_FILE + ".partial")
    partial.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / CONFIG_FILE)
    return folder / WEIGHTS_FILE


def read_about(folder: Path) -> dict[str, Any]:
    """adapter.json, its parts checked for presence. ValueError names the file and what is wrong."""
    path = folder / CONFIG_FILE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        about["config"] = AdapterConfig(**about["config"])
        about["drafter"] = str(about["drafter"])
    except FileNotFoundError:
        raise ValueError(f"{folder}: no {CONFIG_FILE} there; give the folder that `ddtree train adapter` wrote") from None
    except (ValueError, TypeError, KeyError) as error:
        known = ", ".join(field.name for field in fields(AdapterConfig))
        raise ValueError(f'{path}: expected "config" with {known} and "drafter"; {error}') from None
    return about


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The adapter's tensors in `folder`, by the names of `Adapter`."""
    tensors = load_file(folder / WEIGHTS_FILE)
    rename_former(tensors)
    return tensors


def load_adapter(folder: Path, drafter: Path, drafter_config: Any, device: torch.device | str, dtype: torch.dtype) -> Adapter:
    """The adapter in `folder`, for the drafter whose config is given.

    Raises:
        ValueError: it was trained for another drafter or shape, or a tensor is missing, left over or of the wrong shape.
    """
    about = read_about(folder)
    config = about["config"]
    for name in ("hidden_size", "block_size"):
        if getattr(config, name) != getattr(drafter_config, name):
            raise ValueError(
                f"adapter {folder}: {name} is {getattr(config, name)}, the drafter's is {getattr(drafter_config, name)}; "
                "train one for this drafter, or serve with --adapter none"
            )
    if about["drafter"] != fingerprint(drafter):
        raise ValueError(
            f"adapter {folder} was trained for another drafter than {drafter}; train one for it (`ddtree train adapter`), or "
            "serve with --adapter none"
        )
    adapter = Adapter(config, device, dtype)
    tensors, expected = read_tensors(folder), adapter.state_dict()
    for name in sorted(set(tensors) | set(expected)):
        found, wanted = tensors.get(name), expected.get(name)
        if found is None or wanted is None or found.shape != wanted.shape:
            shapes = [None if tensor is None else list(tensor.shape) for tensor in (wanted, found)]
            raise ValueError(f"adapter {folder / WEIGHTS_FILE}: {name} should be {shapes[0]}, is {shapes[1]}")
    adapter.load_state_dict({name: value.to(device, dtype) for name, value in tensors.items()})
    return adapter.requires_grad_(False).eval()
