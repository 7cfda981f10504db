"""What systemd hears, over a real datagram socket."""

import socket

import pytest

from ddtree.service.notify import Notifier


@pytest.fixture
def systemd(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def heard(sock) -> list[str]:
    found = []
    while True:
        try:
            found.append(sock.recv(4096).decode())
        except BlockingIOError:
            return found


def test_each_state_is_said_once(systemd):
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname()})
    for _ in range(2):
        notifier.status("loading")
        notifier.ready()
        notifier.beat()  # nobody asked for a heartbeat
    notifier.status("serving")
    notifier.status("loading")
    notifier.stopping()
    assert heard(systemd) == ["STATUS=loading", "READY=1", "STATUS=serving", "STATUS=loading", "STOPPING=1"]


def test_it_beats_at_half_the_time_that_systemd_waits(systemd):
    now = 0.0
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "10000000"}, lambda: now)
    for step in range(100):  # ten seconds
        now = step / 10
        notifier.beat()
    assert heard(systemd) == ["WATCHDOG=1"] * 2


def test_an_abstract_address():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0ddtree-test-notify")
        Notifier({"NOTIFY_SOCKET": "@ddtree-test-notify"}).ready()
        assert sock.recv(64) == b"READY=1"


def test_a_listener_that_does_not_listen_holds_nothing_up(systemd):
    now = 0.0
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "2"}, lambda: now)
    for step in range(1000):  # many more than a socket holds
        now = float(step)
        notifier.beat()
    assert 0 < len(heard(systemd)) < 1000


def test_where_nobody_listens_nothing_happens():
    Notifier({}).ready()
    Notifier({"NOTIFY_SOCKET": "/nowhere/notify"}).ready()
