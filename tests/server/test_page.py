"""GET /: the page and its files, as the package ships them, under their policy; --no-ui takes it away."""

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from tests.server.fakes import serving

UI = {file.name for file in files("ddtree.server").joinpath("ui").iterdir()}


def test_every_file_is_served_with_its_kind_and_the_policy():
    kinds = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    with serving() as client:
        for path in ["/", *(f"/ui/{name}" for name in UI)]:
            answer = client.get(path)
            kind = kinds["html" if path == "/" else path.rpartition(".")[2]]
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert client.get("/").text == client.get("/ui/index.html").text


def test_no_file_names_another_place():
    with serving() as client:
        for name in UI:
            text = client.get(f"/ui/{name}").text.replace("http://www.w3.org/2000/svg", "")
            assert not any(word in text for word in ("http://", "https://www", "//cdn", "innerHTML", "eval(")), name


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/..%2fapp.py", "/ui/../app.py", "/ui/"])
def test_nothing_else_is_served(path):
    with serving() as client:
        assert client.get(path).status_code == 404


def test_without_a_ui_there_is_no_page():
    with serving(ui=False) as client:
        for path in ("/", "/ui/app.js"):
            answer = client.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["message"]
        assert client.chat().status_code == 200


def test_the_page_needs_no_key_and_what_it_asks_does():
    with serving(api_key="secret") as client:
        assert client.get("/").status_code == 200 and client.get("/v1/models").status_code == 401


def test_the_package_ships_the_page():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    assert "server/ui/*" in project["tool"]["setuptools"]["package-data"]["ddtree"]
