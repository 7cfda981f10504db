"""Ctrl-C: heard whoever started the command, and read between two rounds while an answer is written."""

from __future__ import annotations

import signal
import sys
from types import FrameType


class CtrlC:
    """Called, it says whether Ctrl-C came since `with` began; a second one raises KeyboardInterrupt where it falls.

    An exception would fall anywhere: between two counts of rich's console, which prints nothing from then on, into a finalizer,
    which loses it, or into the middle of an engine's round. In the main thread only; leaves a SIGINT that is ignored so.
    """

    def __enter__(self) -> CtrlC:
        self._came = False
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._come)
        return self

    def __exit__(self, *fault) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self) -> bool:
        return self._came

    def _come(self, sig: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True


def hear_ctrl_c() -> None:
    """Undo that SIGINT is ignored, as a script's `&` leaves it to all that it starts: keys typed here are meant for this command."""
    if sys.stdin.isatty() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
