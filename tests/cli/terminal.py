"""A program in a terminal of its own: what it prints is read as a screen, what is typed reaches it as keys."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pyte

PAUSE_S = 120  # what the program may take on a busy machine


class Terminal:
    """`rows()` is all that was printed, also what has scrolled away; `ignored`: signals that the parent ignores, as a script's `&` has it."""

    def __init__(self, command: list[str], columns: int = 60, lines: int = 24, ignored: Sequence[signal.Signals] = ()):
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000, ratio=1e-4)
        self._stream = pyte.ByteStream(self._screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        # At Ctrl-C a terminal throws away what it has not shown yet; this one is slower to read than any that people use.
        attributes = termios.tcgetattr(slave)
        attributes[3] |= termios.NOFLSH
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        # With fault handlers, SIGABRT makes it say where its threads are.
        env |= {"TERM": "xterm-256color", "PYTHONFAULTHANDLER": "1"}

        def prepare():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            for sig in (signal.SIGINT, signal.SIGQUIT):  # whatever this process ignores
                signal.signal(sig, signal.SIG_IGN if sig in ignored else signal.SIG_DFL)

        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True, preexec_fn=prepare
        )
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
            try:
                if select.select([self._master], [], [], 0.2)[0]:
                    self._stream.feed(os.read(self._master, 512))
            except OSError:  # the program has ended, and all that it said was read
                self._process.wait(PAUSE_S)
                break
        screen = "\n".join(self.rows())
        raise AssertionError(f"not in time, or not before its end\n{self._diagnosis()}\nthe screen:\n{screen}")

    def _diagnosis(self) -> str:
        """Why a key may have had no effect: what becomes of signals, who gets them, where each thread is. Ends the program."""
        modes = termios.tcgetattr(self._master)[3]
        lines = [f"pid {self._process.pid}, ISIG {'on' if modes & termios.ISIG else 'off'}, exit status {self._process.poll()}"]
        if self._process.returncode is None and sys.platform == "linux":
            lines.append(f"signals go to process group {os.tcgetpgrp(self._master)}")
            status = Path(f"/proc/{self._process.pid}/status").read_text()
            lines += [line for line in status.splitlines() if line.startswith(("State", "Sig", "ShdPnd"))]
        self._process.send_signal(signal.SIGABRT)
        said, end = b"", time.monotonic() + 5
        while time.monotonic() < end and select.select([self._master], [], [], 1)[0]:
            try:
                said += os.read(self._master, 65536)
            except OSError:  # all of it was read and nobody writes any more
                break
        begin = said.rfind(b"Fatal Python error")
        return "\n".join([*lines, said[max(begin, 0) :][-5000:].decode(errors="replace")])

    def status(self) -> int:
        """Wait for its end."""
        while self._process.poll() is None:
            if select.select([self._master], [], [], 0.05)[0]:
                try:
                    self._stream.feed(os.read(self._master, 4096))
                except OSError:
                    break
        return self._process.wait(PAUSE_S)
