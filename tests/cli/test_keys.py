"""Keys from a file, and the warning where none is wanted."""

import logging
import socket
from argparse import Namespace

import pytest

from ddtree.cli.keys import keys_of, warn_if_open
from tests.server.fakes import serving


def key_file(tmp_path, text, mode=0o600):
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_every_key_of_the_file_opens(tmp_path):
    keys = keys_of(Namespace(api_key="flag", api_key_file=key_file(tmp_path, "# team a\nfirst\n\n  second \n")))
    assert keys == ("flag", "first", "second")
    with serving(more_api_keys=keys) as client:
        for key in keys:
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for wrong in ("# team a", "", "firs", "third"):
            assert client.get("/v1/models", headers={"x-api-key": wrong}).status_code == 401


@pytest.mark.parametrize(("text", "mode", "says"), [("# none\n", 0o600, "holds no key"), ("k", 0o604, "chmod o-rwx")])
def test_a_useless_or_open_file_is_refused(tmp_path, text, mode, says):
    with pytest.raises(ValueError, match=says):
        keys_of(Namespace(api_key=None, api_key_file=key_file(tmp_path, text, mode)))


def test_no_file_and_an_empty_key_are_refused():
    with pytest.raises(ValueError, match="no such file"):
        keys_of(Namespace(api_key=None, api_key_file="/nowhere"))
    with pytest.raises(ValueError, match="must not be empty"):
        keys_of(Namespace(api_key="", api_key_file=None))


@pytest.mark.parametrize(
    ("host", "keys", "warns"), [("127.0.0.1", (), False), ("0.0.0.0", (), True), ("0.0.0.0", ("k",), False)]
)
def test_a_server_open_to_others_warns(caplog, host, keys, warns):
    with socket.socket() as sock, caplog.at_level(logging.WARNING):
        sock.bind((host, 0))
        warn_if_open(sock, keys)
    assert ("without a key" in caplog.text) == warns
