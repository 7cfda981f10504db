"""Ctrl-C is heard wherever it falls: in ddtree chat the answer stops, the screen lives, the conversation is kept; generate and serve end."""

import builtins
import io
import logging
import signal
import sys
import time
import weakref
from threading import Timer

import pytest
from rich.console import Console

import ddtree.cli.chat
from ddtree.cli.main import INTERRUPTED, main
from ddtree.server.run import Server
from tests.cli.stubs import install, stub_engine


@pytest.fixture(autouse=True)
def heard():
    """As at a terminal, though a suite that a script started with `&` has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def logs_as_before():
    """A command sets what is logged for its whole process, which here is that of other tests too."""
    loggers = [logging.getLogger(name) for name in ("", "ddtree", "ddtree.requests")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


class Talk:
    """`ddtree chat` in this process, on a screen of 24 columns: "hi", then "again", then the end; `shown` at each prompt."""

    def __init__(self, monkeypatch, on_question=lambda: None):
        self.engine = stub_engine("one two three four five six seven eight nine ten ")
        install(monkeypatch.setattr, self.engine)
        out, said = io.StringIO(), iter(["hi", "again"])
        options = {"file": out, "force_terminal": True, "width": 24, "height": 10, "_environ": {"TERM": "xterm"}}
        monkeypatch.setattr(ddtree.cli.chat, "Console", lambda **more: Console(**options, **more))
        self.shown = []

        def ask(*prompt):
            sys.settrace(None)
            self.shown.append(out.getvalue())
            for line in said:
                if line == "hi":
                    on_question()
                return line
            raise EOFError

        monkeypatch.setattr(builtins, "input", ask)

    def status(self):
        try:
            return main(["chat", "--tree-budget", "4"])
        finally:
            sys.settrace(None)


def fall(number, name=None):
    """Ctrl-C at this call of a Python function since the answer began, or of the functions of this name alone."""
    began, count = False, 0

    def trace(frame, event, arg):
        nonlocal began, count
        called = frame.f_code.co_name
        began = began or called == "_answer"
        count += began and name in (None, called)
        if count == number:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    sys.settrace(trace)


# rich counts in the two functions named how deep it is; the others: a template's compilation, then some rounds.
@pytest.mark.parametrize("name, numbers", [("_exit_buffer", range(1, 8)), ("__exit__", range(1, 8)), (None, range(1, 5000, 211))])
def test_it_stops_the_answer_in_whatever_function_it_falls(name, numbers, monkeypatch):
    for number in numbers:
        talk = Talk(monkeypatch, lambda number=number: fall(number, name))
        assert talk.status() == 0
        assert "(stopped)" in talk.shown[1] and talk.shown[1].endswith("> \x1b[0m"), (number, talk.shown[1][-200:])
        assert talk.engine.aborted == [1]
        prompt = bytes(talk.engine.added[1].prompt_token_ids).decode()
        assert prompt.startswith("user: hi\nassistant: ") and prompt.endswith("user: again\nassistant: ")
        assert "ended by" in talk.shown[2]


def test_a_finalizer_does_not_lose_it(monkeypatch):
    """Python drops an exception that arises there."""

    class Forgotten:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    talk = Talk(monkeypatch)
    step, num_steps = talk.engine.step, 0

    def forgetting():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            Forgotten()
        return step()

    talk.engine.step = forgetting
    assert talk.status() == 0 and talk.engine.aborted == [1] and "(stopped)" in talk.shown[1]


def test_a_second_one_does_not_wait_for_the_step(monkeypatch):
    talk = Talk(monkeypatch)

    def hanging():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step went on")

    talk.engine.step = hanging
    assert talk.status() == INTERRUPTED and talk.engine.aborted == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_python_drops_comes_again(monkeypatch):
    """In a weak reference's callback, of which every import has one; `generate` knows no other way to end."""
    engine = stub_engine("round and round " * 1000)
    engine.config.max_context = 10**6
    install(monkeypatch.setattr, engine)
    step, num_steps, references = engine.step, 0, []

    class Referred:
        pass

    def forgetting():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            references.append(weakref.ref(Referred(), lambda gone: signal.raise_signal(signal.SIGINT)))
        time.sleep(0.002)
        return step()

    engine.step = forgetting
    before = sys.unraisablehook
    assert main(["generate", "hi", "--tree-budget", "4", "--max-tokens", "15000"]) == INTERRUPTED and engine.aborted == [1]
    assert sys.unraisablehook is before


def test_the_server_hears_it_before_its_loop_does(monkeypatch):
    """Between asyncio's handler and uvicorn's."""
    install(monkeypatch.setattr, stub_engine())
    serve, late = Server.serve, []

    async def interrupted(self, sockets=None):
        signal.raise_signal(signal.SIGINT)
        await serve(self, sockets)

    def again():
        late.append(True)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Server, "serve", interrupted)
    timer = Timer(20, again)
    timer.start()
    status = main(["serve", "--port", "0", "--tree-budget", "4"])
    timer.cancel()
    assert status == 0 and not late
