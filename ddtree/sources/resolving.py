"""From what the user wrote (`smollm2`, a folder, a .gguf file, `org/name`) to the files to load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ddtree.sources.embedded import EMBEDDED
from ddtree.sources.errors import SourceError
from ddtree.sources.fetching import fetch
from ddtree.sources.hub import is_hub_id, snapshot

NO_DRAFTER = "none"


@dataclass(frozen=True)
class Source:
    """The files of a target and its drafter."""

    name: str  # as the user wrote it
    target: Path  # a folder, or a .gguf file
    drafter: Path | None
    served_name: str  # what the API calls the model
    drafter_reason: str | None = None  # why there is no drafter


def resolve(name: str, drafter: str | None = None, progress: bool = True) -> Source:
    """Find the files of `name` and its drafter, downloading what has to be.

    `drafter` takes the same forms as `name`; None means the model's own, "none" means no drafter.
    SourceError names the value, what was looked for, and what to do.
    """
    # The drafter is checked first: a typing error should not wait for the target's download.
    drafter_path, reason = _drafter(name, drafter, progress)
    target = _locate(name, "model", progress)
    return Source(name, target, drafter_path, _served_name(name, target), reason)


def _drafter(name: str, drafter: str | None, progress: bool) -> tuple[Path | None, str | None]:
    if drafter is None:
        if name not in EMBEDDED:
            return None, "no drafter was given (--drafter)"
        folder = EMBEDDED[name].drafter_folder
        if _has_weights(folder):
            return folder, None
        return None, f"this installation ships no drafter for {name}"
    if drafter.strip().lower() == NO_DRAFTER:
        return None, "the drafter was disabled (--drafter none)"
    if drafter in EMBEDDED:
        folder = EMBEDDED[drafter].drafter_folder
        if not _has_weights(folder):
            raise SourceError(f"--drafter {drafter}: this installation ships no drafter for {drafter}")
        return folder, None
    return _locate(drafter, "--drafter", progress), None


def _locate(value: str, role: str, progress: bool) -> Path:
    """The folder or file that `value` names; `role` only words the error."""
    if value in EMBEDDED:
        return fetch(value, progress=progress)
    path = Path(value).expanduser()
    if path.exists():
        return _checked(path, f"{role} {value}")
    if is_hub_id(value):
        try:
            folder = snapshot(value)
        except SourceError as error:
            raise SourceError(f"{role} {error}") from error
        return _checked(folder, f"{role} {value}")
    missing = "file" if path.suffix == ".gguf" else "folder"
    known = ", ".join(sorted(EMBEDDED))
    raise SourceError(
        f"{role} {value}: no such {missing}; expected a folder with config.json and *.safetensors, "
        f"a .gguf file, a Hub id (org/name), or an embedded name ({known})"
    )


def _checked(path: Path, what: str) -> Path:
    """`path` if it holds a model; SourceError naming what is missing."""
    path = path.absolute()
    if path.is_file():
        if path.suffix != ".gguf":
            raise SourceError(f"{what}: not a model; expected a .gguf file or a folder")
        return path
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ggufs[0]
        found = f"{len(ggufs)} .gguf files; name one of them" if ggufs else "neither it nor a .gguf file"
        raise SourceError(f"{what}: expected config.json, the folder has {found}")
    if len(list(path.glob("*.gguf"))) == 1 and not any(path.glob("*.safetensors")):
        return path  # a drafter as `ddtree train` writes it
    if not any(path.glob("*.safetensors")):
        raise SourceError(
            f"{what}: config.json is there, but neither *.safetensors nor one .gguf (pickled weights are not read)"
        )
    missing = _missing_shards(path)
    if missing:
        raise SourceError(f"{what}: {len(missing)} of its weight files are missing, first {missing[0]}")
    return path


def _missing_shards(folder: Path) -> list[str]:
    """Weight files that the index names and the folder lacks: an interrupted download."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{index}: not a safetensors index ({error})") from error
    return sorted(shard for shard in shards if not (folder / shard).is_file())


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])


def _served_name(name: str, target: Path) -> str:
    if name in EMBEDDED:
        return name
    if not Path(name).expanduser().exists():
        return name  # a Hub id
    return target.stem if target.is_file() else target.resolve().name
