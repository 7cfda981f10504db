"""What systemd is told: ready, alive, stopping (sd_notify(3)). Nothing happens where nobody listens."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping


class Notifier:
    """Sends to `NOTIFY_SOCKET`; beats at half of `WATCHDOG_USEC`."""

    def __init__(self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic):
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._beat_s = int(environment.get("WATCHDOG_USEC", 0)) / 2e6
        self._clock, self._last_beat = clock, float("-inf")
        self._told: set[str] = set()

    def ready(self) -> None:
        """The first request may come. Said once."""
        self._once("READY=1")

    def stopping(self) -> None:
        """No request is taken any more. Said once."""
        self._once("STOPPING=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; each said once in a row."""
        if f"STATUS={text}" not in self._told:
            self._told = {each for each in self._told if not each.startswith("STATUS=")}
            self._once(f"STATUS={text}")

    def beat(self) -> None:
        """Still alive; sent no more often than systemd needs it, so that a loop may call it at every turn."""
        if self._beat_s and self._clock() - self._last_beat >= self._beat_s:
            self._last_beat = self._clock()
            self._send("WATCHDOG=1", patience_s=0.0)

    def _once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._send(message)

    def _send(self, message: str, patience_s: float = 1.0) -> None:
        """A listener that does not listen must not hold up the server: then the message is lost."""
        if not self._address:
            return
        # "@" stands for the null byte of Linux's abstract addresses.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.settimeout(patience_s)
            sock.sendto(message.encode(), address)
