"""Where the cache lies, and what counts as an intact file in it."""

import os
from pathlib import Path

import pytest

from ddtree.sources import cache
from ddtree.sources.cache import cache_dir, hash_file, is_intact


@pytest.mark.parametrize(
    "own, xdg, expected",
    [
        ("/a/b", "/x", Path("/a/b")),
        (None, "/x", Path("/x/ddtree")),
        ("", "/x", Path("/x/ddtree")),
        (None, "relative", Path("/home/u/.cache/ddtree")),
        (None, None, Path("/home/u/.cache/ddtree")),
        ("~/c", None, Path("/home/u/c")),
    ],
)
def test_cache_dir(monkeypatch, own, xdg, expected):
    monkeypatch.setenv("HOME", "/home/u")
    for name, value in (("DDTREE_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cache_dir() == expected


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def test_the_hash_is_taken_once(file, monkeypatch):
    sha256 = hash_file(file)
    assert is_intact(file, 7, sha256)
    monkeypatch.setattr(cache, "hash_file", lambda path: pytest.fail("hashed again"))
    assert is_intact(file, 7, sha256)
    assert not is_intact(file, 8, sha256)


def test_a_file_put_there_by_hand_is_hashed(file):
    sha256 = hash_file(file)
    assert is_intact(file, 7, sha256)
    file.write_bytes(b"wEights")
    os.utime(file, ns=(1, 1))
    assert not is_intact(file, 7, sha256)


def test_absent_folder_and_damaged_marker(file, tmp_path):
    assert not is_intact(tmp_path / "absent", 7, "")
    assert not is_intact(tmp_path, tmp_path.stat().st_size, "")
    cache._marker_path(file).write_text("{")
    assert is_intact(file, 7, hash_file(file))


def test_a_marker_that_cannot_be_written_is_no_error(file, monkeypatch):
    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "replace", refuse)
    assert is_intact(file, 7, hash_file(file))
