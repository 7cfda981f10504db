"""ddtree chat in a real terminal: the text stays whole, one bar lives below it, Ctrl-C stops an answer and nothing else."""

import re
import signal
import sys

from tests.cli.terminal import Terminal

LONG = " ".join(f"word{i}" for i in range(40))
ANSWER = f"A list:\n\n- one\n- two\n\n    indented = True\n{LONG}\n\x1b]0;owned\x07\x1b[2Jend of the answer"
CHILD = f"""
import sys
from ddtree.cli.main import main
from tests.cli.stubs import Pace, install, stub_engine
engine = stub_engine({ANSWER!r})
engine.config.max_context, engine.gate = 10**6, Pace()
install(setattr, engine)
add = engine.add
def adding(request):
    if len(engine.added) == 1:
        engine.script = list(b"round and round ") * 10_000
    return add(request)
engine.add = adding
sys.exit(main(["chat", "--tree-budget", "4", "--max-tokens", "100000"]))
"""


def bars(rows):
    return [row for row in rows if re.match(r"[━─]{8} \d, mean \d\.\d\d in \d+ rounds", row)]


def waits(times):
    """At the prompt, so many answers later."""
    return lambda rows: sum(row.startswith(">") for row in rows) == times and [row for row in rows if row][-1] == ">"


def test_an_answer_streams_above_one_living_bar():
    with Terminal([sys.executable, "-c", CHILD]) as terminal:
        terminal.until(waits(1))
        terminal.type("hi\n")
        states = terminal.until(waits(2))
        assert any(bars(rows) for rows in states) and all(len(bars(rows)) <= 1 for rows in states)
        growing = [bars(rows)[0] for rows in states if bars(rows)]
        assert "━━━───── 3, mean 3.00 in " in growing[0] and growing[-1] != growing[0]
        assert any("▄" in row or "▃" in row for row in growing)

        rows = terminal.rows()
        start = next(i for i, row in enumerate(rows) if row == "> hi") + 1
        stop = next(i for i, row in enumerate(rows) if "ended by" in row)
        text = rows[start:stop]
        assert text[:7] == ["A list:", "", "- one", "- two", "", "    indented = True", text[6]]
        assert " ".join(row for row in text[6:] if row.startswith("word")) == LONG
        assert "␛]0;owned␇␛[2Jend of the answer" in text[-1] and terminal.title() != "owned"
        assert not bars(rows)

        terminal.type("again\n")
        terminal.until(lambda rows: bars(rows) and sum("round and" in row for row in rows) > 4)
        terminal.type("\x03")
        rows = terminal.until(waits(3))[-1]
        assert not bars(rows) and [row for row in rows if row][-2] == "(stopped)"
        terminal.type("/quit\n")
        assert terminal.status() == 0


def test_ctrl_c_is_heard_though_the_parent_ignores_it():
    """As a script does for what it starts with `&`, and the shell of a suite that runs beside other work."""
    with Terminal([sys.executable, "-c", CHILD.replace("len(engine.added) == 1", "True")], ignored=[signal.SIGINT]) as terminal:
        terminal.until(waits(1))
        terminal.type("hi\n")
        terminal.until(lambda rows: bars(rows))
        terminal.type("\x03")
        rows = terminal.until(waits(2))[-1]
        assert not bars(rows) and [row for row in rows if row][-2] == "(stopped)"
        terminal.type("\x03")
        assert terminal.status() == 0
