"""The per-user cache: where it lies, and whether a file in it is the one that was published."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

CHUNK_BYTES = 1 << 20


def cache_dir() -> Path:
    """`DDTREE_CACHE`, else `$XDG_CACHE_HOME/ddtree`, else `~/.cache/ddtree`; not created here."""
    own = os.environ.get("DDTREE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is to be ignored.
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "ddtree"
    return Path.home() / ".cache" / "ddtree"


def is_intact(path: Path, size_bytes: int, sha256: str) -> bool:
    """Is `path` the published file? The size is checked each time, the hash once per size and modification time."""
    try:
        stat = path.stat()
    except OSError:
        return False
    if not path.is_file() or stat.st_size != size_bytes:
        return False
    if _read_marker(path) == _marker(stat, sha256):
        return True
    if hash_file(path) != sha256:
        return False
    write_marker(path, sha256)
    return True


def write_marker(path: Path, sha256: str) -> None:
    """Note beside `path` that its content has this hash, so that the next start need not read it all."""
    marker = _marker_path(path)
    part = marker.with_name(f"{marker.name}.{os.getpid()}.part")
    # A read-only cache still serves; it only hashes on every start.
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(_marker(path.stat(), sha256)), encoding="utf-8")
        os.replace(part, marker)


def hash_file(path: Path) -> str:
    """The sha256 of the file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _marker_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified.json")


def _marker(stat: os.stat_result, sha256: str) -> dict[str, int | str]:
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}


def _read_marker(path: Path) -> object:
    try:
        return json.loads(_marker_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
