"""`ddtree serve --engine sglang` writes SGLang's command, and refuses what that has no word for."""

import pytest

from ddtree.cli.settings import settle
from ddtree.cli.settled import serve
from ddtree.sglang.command import command_of, shown


@pytest.fixture
def folders(tmp_path):
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    return tmp_path / "target", tmp_path / "drafter"


def command(folders, *flags, environment=None):
    found = settle(["--engine", "sglang", str(folders[0]), "--drafter", str(folders[1]), *flags], environment or {})
    return command_of(found.args, found.origins, *folders)[1:]


def test_the_command_names_model_drafter_and_algorithm(folders):
    target, drafter = map(str, folders)
    assert command(folders) == [
        "-m", "sglang.launch_server", "--model-path", target, "--host", "127.0.0.1", "--port", "8000",
        "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", drafter, "--dtype", "auto",
    ]  # fmt: skip


def test_a_tree_budget_counts_the_root_in_sglang(folders):
    found = command(folders, "--tree-budget", "64", "--max-context", "4096", "--engine-args", "--tp-size 2 --chat-template 'a b'")
    assert found[found.index("--speculative-num-draft-tokens") + 1] == "65"
    assert found[found.index("--context-length") + 1] == "4096"
    assert found[-4:] == ["--tp-size", "2", "--chat-template", "a b"]


def test_settings_from_the_environment_count_as_made(folders):
    found = command(folders, environment={"DDTREE_MAX_RUNNING": "3"})
    assert found[found.index("--max-running-requests") + 1] == "3"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replicas", "2"], "--replicas: of ddtree's own engine"),
        (["--max-waiting", "3", "--no-ui"], "--no-ui, --max-waiting: of ddtree's own engine"),
        (["--served-model-name", "a", "--served-model-name", "b"], "under one name, got a, b"),
    ],
)
def test_what_sglang_has_no_word_for_is_refused(folders, flags, said):
    with pytest.raises(ValueError, match=said):
        command(folders, *flags)


def test_a_gguf_target_is_refused(folders, tmp_path):
    found = settle(["--engine", "sglang"], {})
    with pytest.raises(ValueError, match="folders of safetensors"):
        command_of(found.args, found.origins, tmp_path / "model.gguf", folders[1])


def test_a_model_without_a_drafter_is_refused(folders):
    found = settle(["--engine", "sglang"], {})
    with pytest.raises(ValueError, match="needs --drafter"):
        command_of(found.args, found.origins, folders[0], None)


def test_a_key_is_not_shown(folders):
    found = settle(["--engine", "sglang", "--api-key", "s3cret"], {})
    line = shown(command_of(found.args, found.origins, *folders))
    assert "s3cret" not in line and "'(set)'" in line


def test_without_sglang_the_command_says_what_to_install(folders, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install \"ddtree\[sglang\]\""):
        serve(["--engine", "sglang", str(folders[0])])
