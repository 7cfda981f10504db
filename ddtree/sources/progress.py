"""Progress of a download: a bar on a terminal, plain lines elsewhere, nothing when asked for nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_STEP = 0.25  # without a terminal, one line per quarter


class Reporter:
    """Writes to stderr, so that stdout stays the program's own."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._console = Console(stderr=True)

    def line(self, text: str) -> None:
        """Print one line as it is: no markup, no wrapping, so that paths stay whole."""
        if self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Yields `advance_to(num_bytes)`; the total may be an estimate."""
        if not self._enabled:
            yield lambda num_bytes: None
        elif self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=self._console) as progress:
                task = progress.add_task(label, total=total_bytes)
                yield lambda num_bytes: progress.update(task, completed=num_bytes)
        else:
            yield self._line_per_step(label, total_bytes)

    def _line_per_step(self, label: str, total_bytes: int) -> Callable[[int], None]:
        reached = 0

        def advance_to(num_bytes: int) -> None:
            nonlocal reached
            step = min(int(num_bytes / total_bytes / LINE_STEP), int(1 / LINE_STEP))
            if step > reached:
                reached = step
                self.line(f"{label}: {step * LINE_STEP:.0%} of {total_bytes / 1e6:.0f} MB")

        return advance_to
