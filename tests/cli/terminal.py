"""A program in a terminal of its own: what it prints is read as a screen, what is typed reaches it as keys."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time

import pyte

PAUSE_S = 120  # what the program may take on a busy machine


class Terminal:
    """`rows()` is all that was printed, also what has scrolled away; `seen` every state of it that `until` looked at."""

    def __init__(self, command: list[str], columns: int = 60, lines: int = 24):
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000, ratio=1e-4)
        self._stream = pyte.ByteStream(self._screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env | {"TERM": "xterm-256color"}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *fault) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def rows(self) -> list[str]:
        gone = ["".join(line[i].data for i in range(self._screen.columns)).rstrip() for line in self._screen.history.top]
        return [*gone, *(row.rstrip() for row in self._screen.display)]

    def title(self) -> str:
        return self._screen.title

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, condition) -> list[list[str]]:
        """Read until `condition(rows)`; the states on the way, the last of which fulfils it."""
        states, end = [], time.monotonic() + PAUSE_S
        while time.monotonic() < end:
            states.append(self.rows())
            if condition(states[-1]):
                return states
            if select.select([self._master], [], [], 0.2)[0]:
                self._stream.feed(os.read(self._master, 512))
        raise AssertionError("not in time; the screen:\n" + "\n".join(self.rows()))

    def status(self) -> int:
        """Wait for its end."""
        while self._process.poll() is None:
            if select.select([self._master], [], [], 0.05)[0]:
                try:
                    self._stream.feed(os.read(self._master, 4096))
                except OSError:
                    break
        return self._process.wait(PAUSE_S)
