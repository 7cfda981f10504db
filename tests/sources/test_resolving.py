"""What the user wrote becomes files, or an error that names the value and what was looked for."""

import json
from pathlib import Path

import pytest

from ddtree.sources import SourceError, hub, resolve, resolving
from ddtree.sources.embedded import Embedded, embedded
from tests.sources.conftest import CONTENT


@pytest.fixture
def cached(tiny):
    tiny.path.parent.mkdir(parents=True)
    tiny.path.write_bytes(CONTENT)
    return tiny


def model(folder: Path, *shards: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    for shard in shards or ("model.safetensors",):
        (folder / shard).write_bytes(b"")
    return folder


def no_drafter_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(Embedded, "drafter_folder", property(lambda self: tmp_path / "own"))


def test_embedded_brings_its_own_drafter(cached, monkeypatch, tmp_path):
    no_drafter_of_its_own(monkeypatch, tmp_path)
    source = resolve("smollm2")
    assert (source.target, source.served_name) == (cached.path, "smollm2")
    assert source.drafter is None and "ships no drafter" in source.drafter_reason
    own = model(tmp_path / "own")
    assert resolve("smollm2").drafter == own
    assert resolve("smollm2").drafter_reason is None
    assert resolve(str(model(tmp_path / "target")), "smollm2").drafter == own


def test_none_disables_the_drafter(cached):
    source = resolve("smollm2", "none")
    assert source.drafter is None and "--drafter none" in source.drafter_reason


def test_folder_and_gguf(tmp_path, monkeypatch):
    folder = model(tmp_path / "My-Model")
    drafter = model(tmp_path / "drafter")
    source = resolve(str(folder), str(drafter))
    assert (source.target, source.drafter, source.served_name) == (folder, drafter, "My-Model")
    assert "no drafter was given" in resolve(str(folder)).drafter_reason
    file = tmp_path / "files" / "x.Q4.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    assert resolve(str(file)).target == resolve(str(file.parent)).target == file
    assert resolve(str(file)).served_name == "x.Q4"
    monkeypatch.chdir(folder)
    assert resolve(".").served_name == "My-Model"


def test_a_local_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    folder = model(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").target == folder


@pytest.mark.parametrize(
    "value, words",
    [
        ("./x", "model ./x: no such folder; expected a folder with config.json"),
        ("nothing", r"model nothing: no such folder; .* embedded name \(hybrid-tiny, smollm2\)"),
        ("a/b.gguf", "model a/b.gguf: no such file"),
    ],
)
def test_wrong_targets(value, words):
    with pytest.raises(SourceError, match=words):
        resolve(value)


def test_the_packaged_pair_comes_with_its_drafter():
    source = resolve("hybrid-tiny")
    assert source.served_name == "hybrid-tiny" and (source.target / "config.json").is_file()
    assert (source.drafter / "drafter.gguf").is_file() and resolve("hybrid-tiny", "hybrid-tiny").drafter == source.drafter


def test_a_wrong_drafter_is_told_before_the_target_is_fetched(tiny):
    with pytest.raises(SourceError, match="--drafter ./x: no such folder; expected"):
        resolve("smollm2", "./x")
    assert not tiny.path.exists()


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(SourceError, match="expected config.json, the folder has neither it nor a .gguf file"):
        resolve(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(SourceError, match="the folder has 2 .gguf files; name one"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="nor one .gguf"):
        resolve(str(tmp_path))
    with pytest.raises(SourceError, match="not a model; expected a .gguf file or a folder"):
        resolve(str(tmp_path / "config.json"))


def test_a_missing_shard_is_named(tmp_path):
    folder = model(tmp_path / "m", "model-1-of-2.safetensors")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match="1 of its weight files are missing, first model-2-of-2.safetensors"):
        resolve(str(folder))
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(SourceError, match="not a safetensors index"):
        resolve(str(folder))


def test_hub_asks_for_no_pickles(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(model(tmp_path / "snapshot"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    source = resolve("org/name", "org/name-DFlash")
    assert (source.target, source.served_name) == (tmp_path / "snapshot", "org/name")
    assert asked["repo_id"] == "org/name"
    assert not [pattern for pattern in asked["allow_patterns"] if "bin" in pattern or "pt" in pattern]


def test_offline_hub_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceError, match="--drafter org/name: no such folder, and the Hub could not be reached"):
        resolve("./x", "org/name")


@pytest.mark.parametrize("value, is_id", [("a/b", True), ("a/b-1.5_x", True), ("a", False), ("./a", False), ("../a/b", False), ("a/b/c", False), ("a/b.gguf", False), ("/a/b", False), ("~/a", False)])  # fmt: skip
def test_what_a_hub_id_looks_like(value, is_id):
    assert hub.is_hub_id(value) is is_id


def test_the_shipped_drafter_is_found():
    """The package's own drafter lies in it as a GGUF beside its config."""
    folder = embedded("smollm2").drafter_folder
    assert (folder / "drafter.gguf").is_file()
    assert resolving._has_weights(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 14_000_000


def test_a_drafter_folder_with_config_and_gguf_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "drafter.gguf").write_bytes(b"GGUF")
    assert resolving._checked(tmp_path, "--drafter x") == tmp_path
