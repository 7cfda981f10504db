"""The unit as systemd takes it, and the service started by hand just as the unit says."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from ddtree.cli.main import main
from ddtree.cli.settings import settle
from ddtree.service.unit import Service
from tests.server.fakes import wait_for

ROOT = Path(__file__).parents[2]
SERVE = ("serve", "toy", "--port", "0", "--tree-budget", "4")


def entries(unit: str) -> dict[str, str]:
    """Keys and values of the unit; each stands once."""
    found = [line.partition("=")[::2] for line in unit.splitlines() if "=" in line and not line.startswith("#")]
    assert len({key for key, _ in found}) == len(found)
    return dict(found)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("user", ["root", None])
def test_systemd_finds_nothing_to_object_to(tmp_path, user):
    command = (sys.executable, "-m", "ddtree", "serve", "--drafter", "a 'folder' with $pace, 100%", "--port", "8123")
    unit = tmp_path / "ddtree.service"
    unit.write_text(Service("ddtree", command, user).unit())
    done = subprocess.run(
        ["systemd-analyze", "verify", *(["--user"] if user is None else []), str(unit)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    ours = [line for line in done.stderr.splitlines() if "ddtree.service" in line]
    assert done.returncode == 0 and not ours, done.stderr


class Started:
    """The service as systemd would start it: the unit's command, its environment file, its notification socket."""

    def __init__(self, folder: Path, *flags: str):
        service = Service("ddtree", (sys.executable, "-m", "tests.cli.stubs", *SERVE, *flags), "root", drain_s=30)
        self.unit = entries(service.unit())
        settings = [line for line in service.environment().splitlines() if line and not line.startswith("#")]
        self.notifications = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notifications.bind(str(folder / "notify"))
        self.notifications.settimeout(90)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "NOTIFY_SOCKET": str(folder / "notify"),
            "WATCHDOG_USEC": str(int(float(self.unit["WatchdogSec"]) * 1e6) // 100),  # so that the test need not wait
            **dict(line.split("=", 1) for line in settings),
        }
        command = shlex.split(self.unit["ExecStart"])
        self.child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
        self.log = []
        self.reader = threading.Thread(target=lambda: self.log.extend(self.child.stderr), daemon=True)
        self.reader.start()

    def hear(self, wanted: str) -> None:
        """Wait for a notification."""
        while self.notifications.recv(4096).decode() != wanted:
            pass

    def url(self) -> str:
        """From the log, whose last line may still be under way."""
        wait_for(lambda: "ready: http" in "".join(self.log))
        return re.search(r"ready: (http\S+)/v1", "".join(self.log)).group(1)

    def end(self) -> int:
        code = self.child.wait(60)
        self.reader.join(10)
        self.child.stderr.close()
        self.notifications.close()
        return code


@pytest.mark.parametrize("flags", [(), ("--replicas", "2", "--device", "cpu")], ids=["one", "two replicas"])
def test_started_as_the_unit_says_and_stopped_with_a_request_in_flight(tmp_path, flags, request):
    service = Started(tmp_path, *flags)
    request.addfinalizer(service.child.kill)  # whatever fails; its replicas and proxy go with it
    service.hear("READY=1")
    url = service.url()
    service.hear("WATCHDOG=1")
    body = {"prompt": "hi", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        assert client.get("/health").status_code == 200
        pids = [each["pid"] for each in client.get("/stats").json().get("replicas", ())]
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            # KillMode=mixed: the main process alone gets the signal.
            assert service.unit["KillMode"] == "mixed"
            service.child.terminate()
            service.hear("STOPPING=1")
            rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""] and '"finish_reason":"length"' in "".join(rest)
    assert service.end() == 0, service.log
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


def test_the_drain_ends_before_systemd_loses_patience():
    service = Service("ddtree", ("x",), "root", drain_s=77)
    assert int(entries(service.unit())["TimeoutStopSec"]) > 77
    settings = dict(line.split("=", 1) for line in service.environment().splitlines() if "=" in line)
    assert settings["DDTREE_DRAIN"] == "77"
    examples = {key.removeprefix("#"): value for key, value in settings.items()}
    assert settle([], examples | {"DDTREE_GPUS": "0"}).args.drain == 77  # every example is a setting


def test_install_writes_both_files_and_keeps_what_was_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["systemd", "install", "--user-service", "--name", "llm", "--", "toy", "--port", "8123"]) == 0
    unit, environment = tmp_path / "systemd/user/llm.service", tmp_path / "ddtree/llm.env"
    assert f"wrote {unit}" in capsys.readouterr().out
    assert entries(unit.read_text())["ExecStart"] == f"{sys.executable} -m ddtree serve toy --port 8123"
    assert entries(unit.read_text())["EnvironmentFile"] == str(environment)
    assert environment.stat().st_mode & 0o077 == 0
    environment.write_text("DDTREE_PORT=1\n")
    assert main(["systemd", "install", "--user-service", "--name", "llm", "--", "toy"]) == 0
    assert environment.read_text() == "DDTREE_PORT=1\n" and f"kept {environment}" in capsys.readouterr().out


def test_print_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["systemd", "print", "--user-service"]) == 0
    assert "ExecStart=" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_flags_that_serve_would_refuse_are_refused_now(capsys):
    with pytest.raises(SystemExit):
        main(["systemd", "print", "--", "--port", "x"])
    assert "--port" in capsys.readouterr().err
