"""Settings by file, environment and flag: who wins, what is refused, and that each origin is said."""

import pytest

from ddtree.cli.serve_flags import add_serve, as_flags
from ddtree.cli.settings import settle, without_settings


def settled(tmp_path, text="", environment=None, *flags, name="box.toml"):
    file = tmp_path / name
    file.write_text(text)
    return settle(["--config", str(file), *flags], environment or {})


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path):
    text = 'host = "::1"\nport = 1001\nmax-waiting = 7\nserved-model-name = ["a", "b"]\nno-ui = true\ngpus = [0, 1]\n'
    found = settled(tmp_path, text, {"DDTREE_PORT": "1002", "DDTREE_MAX_WAITING": "8", "DDTREE_CACHE": "/x"}, "--port", "1003")
    args, origins = found.args, found.origins
    assert (args.host, args.max_waiting, args.port) == ("::1", 8, 1003)
    assert (origins["host"], origins["max_waiting"], origins["port"]) == (str(tmp_path / "box.toml"), "DDTREE_MAX_WAITING", "a flag")
    assert args.served_model_name == ["a", "b"] and args.no_ui is True and args.gpus == ("0", "1")
    assert args.drain == 3 and origins["drain"] == "default" and args.model == "smollm2"
    lines = found.describe()
    assert "setting port 1003, from a flag" in lines and "setting max-waiting 8, from DDTREE_MAX_WAITING" in lines
    assert lines[-1].startswith("default settings: ") and "drain 3" in lines[-1]


def test_without_any_all_is_as_the_flags_say():
    found = settle([], {})
    assert set(found.origins.values()) == {"default"} and found.args.port == 8000 and found.args.replicas is None


def test_yaml_does_as_well(tmp_path):
    found = settled(tmp_path, "port: 1001\nmodel: hybrid-tiny\nmax_context: 99\n", name="box.yaml")
    assert (found.args.port, found.args.model, found.args.max_context) == (1001, "hybrid-tiny", 99)


def test_the_config_may_be_named_in_the_environment(tmp_path):
    (tmp_path / "x.toml").write_text("port = 5")
    assert settle([], {"DDTREE_CONFIG": str(tmp_path / "x.toml")}).args.port == 5


def test_switches_and_lists_in_the_environment():
    switches = {"DDTREE_NO_UI": "yes", "DDTREE_VERBOSE": "0", "DDTREE_BATCH_INVARIANT": "1"}
    found = settle([], {**switches, "DDTREE_CORS_ORIGIN": "https://a, https://b"})
    assert found.args.no_ui is found.args.batch_invariant is True and found.args.verbose is False and found.args.cors_origin == ["https://a", "https://b"]


def test_a_key_is_not_shown():
    found = settle(["--api-key", "s3cret"], {})
    assert found.args.api_key == "s3cret" and "s3cret" not in "\n".join(found.describe())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "prot is no setting; did you mean port?"),
        ("port = 70000", "port must be an integer in 0 ... 65535, got '70000'"),
        ("port = true", "port must be a text or a number, got true"),
        ("no-ui = 1", "no-ui must be true or false, got 1"),
        ('dtype = "int8"', "dtype must be one of auto, float32, bfloat16, got 'int8'"),
        ("[serve]\nport = 1", "serve is no setting"),
        ("port = ", "box.toml: "),
    ],
)
def test_what_a_file_gets_wrong_is_named(tmp_path, text, says):
    with pytest.raises(ValueError) as error:
        settled(tmp_path, text)
    assert says in str(error.value) and "box.toml" in str(error.value)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"DDTREE_PROT": "1"}, "DDTREE_PROT is no setting; did you mean port?"),
        ({"DDTREE_PORT": "x"}, "DDTREE_PORT must be an integer"),
        ({"DDTREE_NO_UI": "maybe"}, "DDTREE_NO_UI must be one of 1, true"),
        ({"DDTREE_CONFIG": "/nowhere.toml"}, "/nowhere.toml: no such file"),
        ({"DDTREE_CONFIG": __file__}, "must end in .toml, .yaml, .yml"),
    ],
)
def test_what_the_environment_gets_wrong_is_named(environment, says):
    with pytest.raises(ValueError) as error:
        settle([], environment)
    assert says in str(error.value)


def test_a_replica_is_told_all_by_flags():
    flags = ["toy", "--port", "9", "--served-model-name", "a", "--served-model-name", "b", "--cors-origin", "", "--no-ui"]
    flags += ["--gpus", "0,1", "--cache-memory", "1.5"]
    args = settle(flags, {"DDTREE_MAX_WAITING": "7"}).args
    again = settle(as_flags(args, api_key=None, config=None), {}).args
    assert vars(again) == vars(args)
    kept = without_settings({"DDTREE_MAX_WAITING": "7", "DDTREE_CONFIG": "x", "DDTREE_CACHE": "/c", "PATH": "/bin"})
    assert kept == {"DDTREE_CACHE": "/c", "PATH": "/bin"}
    assert "--replica-index" not in str(add_serve.__doc__) and all(not each.startswith("--api-key=") for each in as_flags(args, api_key=None))
