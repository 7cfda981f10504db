"""Ctrl-C: heard whoever started the command, and read between two rounds while an answer is written."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 0.05  # after which a lost KeyboardInterrupt is raised again


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


@contextmanager
def lost_none() -> Iterator[None]:
    """A KeyboardInterrupt that Python drops, as it does in finalizers and weak references' callbacks (each import has one), comes again."""
    before = sys.unraisablehook

    def hear(dropped) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        # Not here, where it would be dropped as well.
        timer = threading.Timer(AGAIN_S, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hear
    try:
        yield
    finally:
        sys.unraisablehook = before
