"""Where an answer is written as it comes: a terminal, whose last line lives, or a file or pipe."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

# What a model writes must not move the cursor or set the title: control characters become signs.
SIGNS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
SIGNS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def screen_of(console: Console) -> LiveScreen | PlainScreen:
    """The kind that fits where the console writes."""
    return LiveScreen(console) if console.is_terminal and not console.is_dumb_terminal else PlainScreen(console)


class PlainScreen:
    """Text as it is, nothing below it."""

    def __init__(self, console: Console):
        self._console = console

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *fault) -> None:
        self._console.print()

    def write(self, text: str, style: str = "") -> None:
        self._console.print(text, end="", style=style, markup=False, soft_wrap=True)

    def show(self, below: Text) -> None:
        """A pipe has no place for what changes."""


class LiveScreen:
    """Text in rows, broken between words. Rows that can change no more are printed; the last one, and a line below it, are drawn anew."""

    def __init__(self, console: Console):
        self._console = console
        self._row = Text()
        self._below = Text()
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(self, *fault) -> None:
        self._live.__exit__(*fault)
        self._console.print(self._row)

    def write(self, text: str, style: str = "") -> None:
        self._row.append(text.translate(SIGNS), style)
        # One column stays free, since terminals disagree on what follows a full row.
        rows = [row for line in self._row.split("\n", allow_blank=True) for row in self._wrapped(line)]
        for row in rows[:-1]:
            self._console.print(row)
        self._row = rows[-1]
        self._draw()

    def show(self, below: Text) -> None:
        """Put this line below the text, in the place of the one before."""
        self._below = below
        self._draw()

    def _wrapped(self, line: Text) -> list[Text]:
        return list(line.wrap(self._console, max(self._console.width - 1, 1), overflow="fold")) or [line]

    def _draw(self) -> None:
        self._live.update(Group(self._row, self._below), refresh=True)
