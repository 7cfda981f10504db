"""The command line: one clear line and status 2 for faults, instant help, clean ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.cli import loaded
from ddtree.cli.main import main
from ddtree.sources import Source
from tests.cli.stubs import SOURCE, install, stub_engine
from tests.server.fakes import THINKING_TEMPLATE, ByteTokenizer


def run(capsys, *argv):
    code = main(argv)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_help_imports_no_room():
    code = (
        "import sys; from ddtree.cli.main import build_parser; build_parser().format_help();"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'rich', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_supervisor_imports_no_torch():
    code = "import sys, ddtree.cli.settled, ddtree.cli.replicas; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_command_prints_help(capsys):
    code, out, _ = run(capsys)
    assert code == 2 and "serve" in out


BAD_FLAGS = [
    ("serve", "--port", "x"),
    ("serve", "--port", "65536"),
    ("serve", "--tree-budget", "-1"),
    ("serve", "--tree-budget", "1.5"),
    ("serve", "--dtype", "float16"),
    ("serve", "--max-context", "1"),
    ("serve", "--replicas", "0"),
    ("generate",),
    ("generate", "x", "--temperature", "3"),
    ("generate", "x", "--max-tokens", "0"),
    ("generate", "x", "--raw", "--chat"),
    ("nope",),
]


@pytest.mark.parametrize("argv", BAD_FLAGS, ids=" ".join)
def test_bad_flags(capsys, argv):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2 and "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["serve", "--tree-budget", "1000000000"], "--tree-budget must lie in 0 ... 1024, got 1000000000"),
        (["serve", "ddtree/embedded/hybrid-tiny-dflash"], "this is a drafter; give its target as MODEL"),
    ],
)
def test_what_is_known_at_once_is_said_before_loading(capsys, monkeypatch, argv, words):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("ddtree.cli.loaded.Tokenizer.load", lambda path: pytest.fail("nothing is to be loaded"))
    assert main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_a_wrong_path_is_one_line(capsys, command):
    argv = ["generate", "hi", "--model", "./nowhere"] if command == "generate" else [command, "./nowhere"]
    code, _, err = run(capsys, *argv, *(["--port", "0"] if command == "serve" else []))
    assert code == 2
    errors = [line for line in err.splitlines() if line.startswith("ddtree: error: ")]
    assert len(errors) == 1 and "nowhere" in errors[0]


def test_replicas_and_port(capsys):
    code, _, err = run(capsys, "serve", "--replicas", "2", "--gpus", "0", "--port", "0")
    assert code == 2 and "--replicas 2 and 1 --gpus" in err
    from ddtree.server.run import listen_on

    with listen_on("127.0.0.1", 0) as sock:
        code, _, err = run(capsys, "serve", "--port", str(sock.getsockname()[1]))
    assert code == 2 and "in use" in err and "--port" in err


def test_generate_as_chat_and_raw(capsys, monkeypatch):
    engine = stub_engine()
    install(monkeypatch.setattr, engine)
    code, out, err = run(capsys, "generate", "hi", "--tree-budget", "4", "--stats")
    assert (code, out) == (0, "hello\n") and "6 tokens, ended by stop" in err and "acceptance length" in err
    assert bytes(engine.added[-1].prompt_token_ids) == b"user: hi\nassistant: "
    run(capsys, "generate", "hi", "--raw", "--tree-budget", "0", "--temperature", "0.5", "--seed", "3")
    request = engine.added[-1]
    assert bytes(request.prompt_token_ids) == b"hi"
    assert (request.seed, request.sampling.temperature, request.tree_budget) == (3, 0.5, 0)


def test_generate_without_a_template_is_raw(capsys, monkeypatch):
    engine = stub_engine()
    install(monkeypatch.setattr, engine, ByteTokenizer(None))
    assert run(capsys, "generate", "hi", "--tree-budget", "0")[0] == 0
    assert bytes(engine.added[-1].prompt_token_ids) == b"hi"
    assert run(capsys, "generate", "hi", "--chat", "--tree-budget", "0")[0] == 2


def test_generate_refuses_what_cannot_be(capsys, monkeypatch):
    install(monkeypatch.setattr, stub_engine())
    assert "no tokens" in run(capsys, "generate", "", "--raw", "--tree-budget", "0")[2]
    assert "512" in run(capsys, "generate", "a" * 600, "--raw", "--tree-budget", "0")[2]
    assert "1024" in run(capsys, "generate", "hi", "--tree-budget", "2000")[2]
    plain = Source("toy", SOURCE.target, None, "toy", "no drafter was given (--drafter)")
    install(monkeypatch.setattr, stub_engine(drafter=False), source=plain)
    code, _, err = run(capsys, "generate", "hi", "--tree-budget", "8")
    assert code == 2 and "--drafter" in err
    assert run(capsys, "generate", "hi")[0] == 0


def test_ctrl_c_frees_the_place(capsys, monkeypatch):
    engine = stub_engine("x" * 300)
    install(monkeypatch.setattr, engine)
    step, steps = engine.step, []

    def interrupted():
        steps.append(1)
        if len(steps) > 3:
            raise KeyboardInterrupt
        return step()

    engine.step = interrupted
    code, _, _ = run(capsys, "generate", "hi", "--tree-budget", "0")
    assert code == 130 and engine.aborted == [1]


def test_chat_keeps_the_conversation(capsys, monkeypatch):
    engine = stub_engine()
    install(monkeypatch.setattr, engine)
    said = iter(["hi", "", "again", "/reset", "new", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *args: next(said))
    code, out, _ = run(capsys, "chat", "--tree-budget", "4", "--system", "s")
    assert code == 0 and out.count("hello") == 3 and "acceptance length" in out
    prompts = [bytes(request.prompt_token_ids).decode() for request in engine.added]
    assert prompts == [
        "system: s\nuser: hi\nassistant: ",
        "system: s\nuser: hi\nassistant: hello\nuser: again\nassistant: ",
        "system: s\nuser: new\nassistant: ",
    ]


def test_chat_shows_the_thought_and_keeps_it_apart(capsys, monkeypatch):
    """The template drops earlier thoughts only if they come as such."""
    template = THINKING_TEMPLATE.replace("{{ m.content }}", "{{ m.content }}[{{ m.reasoning_content }}]")
    engine = stub_engine("why\n</think>\n\nyes")
    install(monkeypatch.setattr, engine, ByteTokenizer(template))
    said = iter(["hi", "again", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *args: next(said))
    code, out, _ = run(capsys, "chat", "--tree-budget", "0", "--thinking", "on")
    assert code == 0 and "why\n\nyes\n" in out and "think>" not in out
    prompt = bytes(engine.added[-1].prompt_token_ids).decode()
    assert prompt == "user: hi[]\nassistant: yes[why]\nuser: again[]\nassistant: <think>\n"


def test_thinking_switch(capsys, monkeypatch):
    engine = stub_engine()
    install(monkeypatch.setattr, engine, ByteTokenizer(THINKING_TEMPLATE))
    for switch, end in (("on", "assistant: <think>\n"), ("off", "assistant: ")):
        assert run(capsys, "generate", "hi", "--tree-budget", "0", "--thinking", switch)[0] == 0
        assert bytes(engine.added[-1].prompt_token_ids).decode().endswith(end)
    code, _, err = run(capsys, "generate", "hi", "--raw", "--thinking", "on")
    assert code == 2 and "--thinking on: a raw prompt" in err
    install(monkeypatch.setattr, engine)
    for command in (("chat",), ("generate", "hi")):
        code, _, err = run(capsys, *command, "--thinking", "on")
        assert code == 2 and "knows no thinking" in err


def test_chat_survives_a_turn_that_is_too_long(capsys, monkeypatch):
    engine = stub_engine()
    install(monkeypatch.setattr, engine)
    said = iter(["a" * 600, "hi"])

    def ask(*args):
        for line in said:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    code, out, _ = run(capsys, "chat", "--tree-budget", "0")
    assert code == 0 and "512" in out and "hello" in out


def test_acceptance_card(tmp_path):
    assert loaded.acceptance_of(tmp_path) is loaded.ASSUMED_ACCEPTANCE
    card = tmp_path / "acceptance.json"
    card.write_text(json.dumps({"0": {"16": 2.5}}))
    assert loaded.acceptance_of(tmp_path) == {"0": {"16": 2.5}}
    for wrong in ("[", "[]", '{"0": 3}', '{"0": {"16": "x"}}'):
        card.write_text(wrong)
        with pytest.raises(ValueError, match=r"acceptance\.json"):
            loaded.acceptance_of(tmp_path)
