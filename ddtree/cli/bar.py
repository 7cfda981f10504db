"""The acceptance of a running answer in one line: the last round as a bar, the mean, the speed, the rounds before it."""

from __future__ import annotations

from rich.text import Text

LEVELS = "▁▂▃▄▅▆▇█"
RECENT = 24  # rounds that are drawn
# Tokens of a round, for light and dark terminals alike.
SHADES = ((8, "bold green underline"), (5, "bold green"), (3, "green"), (2, "cyan"), (0, ""))


def shade(num_tokens: int) -> str:
    """The style of text that so many tokens came with."""
    return next(style for least, style in SHADES if num_tokens >= least)


def acceptance_bar(lengths: list[int], most: int, tokens_per_s: float | None, width: int) -> Text:
    """`lengths`: tokens that each round brought; `most`: those that a round can bring; at most `width` columns."""
    line = Text(no_wrap=True, overflow="crop")
    if lengths and most > 1:
        last = min(lengths[-1], most)
        line.append("━" * last, _colour(last) or "bold")
        line.append("─" * (most - last), "dim")
        line.append(f" {lengths[-1]}, mean {sum(lengths) / len(lengths):.2f} in {len(lengths)} rounds", "dim")
    elif lengths:
        line.append(f"plain decoding, {len(lengths)} rounds", "dim")
    if tokens_per_s is not None:
        line.append(f" · {tokens_per_s:.1f} tokens/s", "dim")
    room = min(width - len(line) - 1, RECENT) if most > 1 else 0
    if room > 0 and lengths:
        line.append(" ")
        for length in lengths[-room:]:
            line.append(LEVELS[min(length, most) * (len(LEVELS) - 1) // most], _colour(length))
    line.truncate(width)
    return line


def _colour(num_tokens: int) -> str:
    return shade(num_tokens).replace(" underline", "")
