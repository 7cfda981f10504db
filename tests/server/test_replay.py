"""ddtree trace: what a stream or an audit saved, as a page that needs no server."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddtree.cli.main import main
from ddtree.server.replay import replay_page
from ddtree.server.saved_trace import read_rounds
from tests.server.browser import chromium  # noqa: F401
from tests.server.scripted import scripted_server

AUDITED = {
    "prompt_id": "p1",
    "round": 1,
    "context_length": 4,
    "token_ids": [5, 6, 7],
    "parents": [-1, 0, 0],
    "positions": [4, 5, 5],
    "path": [0, 2],
    "emitted": [7, 9],
    "text": "xy",
}


def saved_stream(**fields):
    """In a thread of its own, as the browser's tests keep an event loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_saved_stream, fields).result()


def _saved_stream(fields):
    with scripted_server("some") as client:
        body = {"prompt": "hello", "seed": 3, "max_tokens": 40, "ignore_eos": True, "tree_budget": 16, "temperature": 0.8}
        return client.post("/v1/completions", body | fields | {"stream": True, "ddtree_trace": True}).text


def test_streams_as_they_came_and_lines_of_an_audit_are_read():
    groups = read_rounds(saved_stream(n=2).splitlines())
    assert list(groups) == ["choice 0", "choice 1"]
    assert all([each["round"] for each in rounds] == list(range(1, len(rounds) + 1)) for rounds in groups.values())
    ((name, (found,)),) = read_rounds([json.dumps(AUDITED)]).items()
    assert name == "p1" and found["depths"] == [0, 1, 1] and found["tokens"] == ["#5 ", "#6 ", "#7 "]
    assert found["bonus_token"] == {"token_id": 9, "token": "#9 "}


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "no round"),
        ("data: [DONE]", "no round"),
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is not an object"),
        ('{"path": [0]}', "no token_ids, parents, emitted"),
        (json.dumps(AUDITED | {"parents": [-1, 2, 0]}), "name one earlier node for each other, got [-1, 2, 0]"),
        (json.dumps(AUDITED | {"path": [0, 3]}), "path must name nodes below 3"),
        (json.dumps(AUDITED | {"parents": [-1, -1, 0]}), "parents must be -1 for the root"),
        (json.dumps(AUDITED | {"path": [0, 2, 1]}), "path must begin at node 0 and go from parent to child, got [0, 2, 1]"),
        (json.dumps(AUDITED | {"token_ids": [5, None, 7]}), "token_ids must be token ids, got [5, null, 7]"),
        (json.dumps(AUDITED | {"emitted": [7, 9, 9]}), "emitted must be at most 2 token ids"),
        (json.dumps(AUDITED | {"probabilities": [1, 0.5]}), "probabilities must have 3 numbers from 0 to 1, one for each of token_ids, got [1, 0.5]"),
        (json.dumps(AUDITED | {"probabilities": [1, 0.5, float("nan")]}), "probabilities must have 3 numbers from 0 to 1"),
        (json.dumps(AUDITED | {"tokens": ["a", "b"]}), 'tokens must have 3 texts, one for each of token_ids, got ["a", "b"]'),
        (json.dumps(AUDITED | {"bonus_token": 9}), "bonus_token must be"),
        (json.dumps(AUDITED | {"stage_ms": {"draft": 1}}), 'stage_ms must have milliseconds for draft, build, verify, accept, commit, got {"draft": 1}'),
        (json.dumps(AUDITED | {"round_ms": "5"}), 'round_ms must be milliseconds, got "5"'),
        (json.dumps(AUDITED | {"round": "one"}), "round must be the round's number"),
        ('{"ddtree_trace": [1]}', "ddtree_trace must be an object, got [1]"),
        ('data: {"error": {"message": "out of memory"}}', "no round"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, capsys, line, words):
    file = tmp_path / "t.jsonl"
    file.write_text(line)
    assert main(["trace", str(file)]) == 2
    error = capsys.readouterr().err
    assert words in error and "t.jsonl" in error and error.count("\n") == 1 and "ddtree audit --trace" in error


def test_a_trace_is_not_overwritten(tmp_path, capsys):
    file = tmp_path / "t.html"
    file.write_text(json.dumps(AUDITED))
    assert main(["trace", str(file)]) == 2 and "name another file" in capsys.readouterr().err
    assert file.read_text() == json.dumps(AUDITED)


def test_the_page_replays_every_round(chromium, tmp_path, capsys):  # noqa: F811
    file = tmp_path / "saved.txt"
    file.write_text(saved_stream())
    assert main(["trace", str(file)]) == 0
    page_file = tmp_path / "saved.html"
    assert capsys.readouterr().out.strip() == str(page_file)
    rounds = read_rounds(file.read_text().splitlines())["choice 0"]
    page = chromium.new_page()
    faults = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(page_file.as_uri())
    page.wait_for_selector(".tree svg")
    assert page.locator("#text .round").count() == len(rounds) + 1
    assert page.inner_text("[data-part=nodes]") == str(sum(len(each["tokens"]) - 1 for each in rounds))
    page.select_option("#pace", "2")
    page.click("#play")
    page.wait_for_selector(f"[data-part=caption]:has-text('Round {len(rounds)}:')")
    page.wait_for_selector("#play:has-text('Play')")
    assert page.locator("#text .here").count() == 1 and not faults
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    assert not found, [(each["id"], [node["html"][:160] for node in each["nodes"]]) for each in found]
    page.close()


def test_markup_in_a_trace_is_text(chromium, tmp_path):  # noqa: F811
    evil = "</script><img src=x onerror=alert(1)>"
    round_ = AUDITED | {"tokens": [evil, evil, evil], "bonus_token": {"token_id": 9, "token": evil}, "prompt_id": evil}
    path = tmp_path / "evil.html"
    path.write_text(replay_page(read_rounds([json.dumps(round_)]), evil))
    page = chromium.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector(".tree svg")
    assert page.locator("img").count() == 0 and page.inner_text("h1") == evil and evil in page.inner_text("#text")
    page.close()


def test_a_character_in_several_tokens_is_read_as_one(chromium, tmp_path):  # noqa: F811
    """An elephant in three tokens over two rounds: its last box shows it, those before a mark."""
    ((_, (first,)),) = read_rounds([json.dumps(AUDITED)]).items()
    first |= {"tokens": ["a", "x", "bytes:\\xf0\\x9f"], "bonus_token": {"token_id": 9, "token": "bytes:\\x90"}}
    second = first | {"round": 2, "tokens": ["bytes:\\x90", "y", "bytes:\\x98"], "bonus_token": {"token_id": 8, "token": "!"}}
    file = tmp_path / "elephant.html"
    file.write_text(replay_page({"p1": [first, second]}, "elephant"), encoding="utf-8")
    page = chromium.new_page()
    page.goto(file.as_uri())
    assert page.text_content("#text") == "a🐘!"
    drawn = []
    for number in (1, 2):
        page.wait_for_selector(f"[data-part=caption]:has-text('Round {number}:')")
        drawn.append([page.text_content(f".tree text.{kind}") for kind in ("root", "accepted", "bonus")])
        page.press("[data-part=round]", "ArrowRight")
    assert drawn == [["a", "‹f09f›", "+‹90›"], ["‹90›", "🐘", "+!"]]
    page.press("[data-part=tree]", "Home")
    assert page.inner_text("[data-part=node]") == "‹90› (root, piece of 🐘)"
    page.close()
