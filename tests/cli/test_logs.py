"""Log lines that machines read: whole JSON, one id through client, log and answer, and no word of a prompt."""

import json
import logging

from ddtree.cli.logs import JournalLines, JsonLines
from tests.server.fakes import serving

PROMPT = "my secret diary"


def request_lines(caplog, **settings):
    with caplog.at_level(logging.DEBUG), serving(api_key="key", **settings) as client:
        answer = client.post(
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 2},
            headers={"Authorization": "Bearer key", "X-Request-Id": "mine-1"},
        )
        wrong = client.post("/v1/completions", {"prompt": PROMPT}, headers={"X-Request-Id": "bad id"})
        client.post("/v1/completions", {"prompt": [PROMPT], "nonsense": 1}, headers={"Authorization": "Bearer key"})
    lines = [json.loads(JsonLines(3).format(record)) for record in caplog.records]
    return answer, wrong, lines


def test_one_id_in_the_answer_and_in_the_log(caplog):
    answer, wrong, lines = request_lines(caplog)
    assert answer.headers["x-request-id"] == "mine-1"
    assert wrong.headers["x-request-id"].startswith("req-")
    mine = next(line for line in lines if line.get("request_id") == "mine-1")
    assert (mine["method"], mine["path"], mine["status"], mine["replica"]) == ("POST", "/v1/completions", 200, 3)
    assert mine["level"] == "info" and mine["duration_s"] >= 0
    refused = next(line for line in lines if line.get("request_id") == wrong.headers["x-request-id"])
    assert refused["status"] == 401


def test_prompts_are_logged_only_where_asked_for(caplog):
    *_, lines = request_lines(caplog)
    assert lines and PROMPT not in json.dumps(lines)
    caplog.clear()
    *_, lines = request_lines(caplog, log_prompts=True)
    assert PROMPT in next(line for line in lines if line.get("request_id") == "mine-1")["body"]


def test_a_traceback_is_one_json_line_and_journal_lines_carry_the_level():
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError as error:
        record = logging.LogRecord("ddtree", logging.ERROR, "", 0, "it %s", ("failed",), (type(error), error, None))
    line = JsonLines(None).format(record)
    assert "\n" not in line and json.loads(line)["message"] == "it failed" and "two\nlines" in json.loads(line)["traceback"]
    assert "replica" not in json.loads(line)
    assert all(part.startswith("<3>") for part in JournalLines("%(message)s").format(record).splitlines())
