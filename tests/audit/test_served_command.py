"""ddtree audit MODEL --url: a real server on a socket, beside the model that it says it serves."""

from __future__ import annotations

import json
from contextlib import contextmanager

import torch

from ddtree import load_engine
from ddtree.cli.main import main
from ddtree.server.app import create_app
from ddtree.server.facts import facts_of
from ddtree.server.settings import ServerSettings
from ddtree.server.worker import Worker
from ddtree.sources import resolve
from ddtree.text import Tokenizer
from tests.server.fakes import wait_for
from tests.server.live import live


@contextmanager
def server(spoil=lambda model: None):
    """hybrid-tiny as it is served, with `spoil` done to the target's weights."""
    source = resolve("hybrid-tiny")
    engine = load_engine(source.target, source.drafter, device="cpu", dtype="float32", max_context=512)
    spoil(engine.target.model)
    worker = Worker(lambda: (engine, facts_of(engine, 16))).start()
    app = create_app(worker, Tokenizer.load(source.target), ServerSettings(served_names=("hybrid-tiny",), target="hybrid-tiny"))
    wait_for(lambda: worker.state == "ready")
    try:
        with live(app) as url:
            yield url
    finally:
        worker.stop()


def audited(url, capsys):
    """Exit status and the last line."""
    argv = ["audit", "hybrid-tiny", "--url", url, "--budgets", "0,8", "--max-tokens", "6", "--limit", "1", "--thinking", "off"]
    status = main([*argv, "--device", "cpu", "--dtype", "float32"])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_model_itself_is_identical(capsys):
    with server() as url:
        status, found = audited(url, capsys)
    assert status == 0 and found["verdict"] == "identical" and not found["faults"], found
    assert found["reference"] == "a local model" and found["url"].startswith(url) and found["budgets"] == [0, 8]
    assert found["tokens"] == 12 and found["acceptance_length"]


def test_another_model_under_its_name_is_found(capsys):
    def spoil(model):
        with torch.no_grad():
            model.norm.scale.neg_()

    with server(spoil) as url:
        status, found = audited(url, capsys)
    assert status == 1 and found["verdict"] == "mismatch", found
    assert {each["against"] for each in found["divergences"]} == {"the local model"}
    assert "is not that of the local model" in found["divergences"][0]["where"]
