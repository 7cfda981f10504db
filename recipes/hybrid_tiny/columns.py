"""Written arithmetic: the lines by which a sum is worked out, column by column, and what they come to.

Every number in a line is computed from the columns, and the result is read off the digits written, lowest first: the
lines are the computation, not its illustration. Whole numbers stand apart (`478 + 356`), digits close (`8+6=14`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Worked:
    """One operation worked out."""

    lines: tuple[str, ...]
    result: int
    inner: tuple[tuple[int, int], ...] = ()  # operand pairs of the operations inside a multiplication


def work(operator: str, left: int, right: int) -> Worked:
    """`left operator right` for non-negative operands and an operator of `+`, `-`, `×`; ValueError for others."""
    if left < 0 or right < 0:
        raise ValueError(f"operands must be >= 0, got {left} and {right}; work on their sizes")
    if operator not in WORK:
        raise ValueError(f"operator must be one of {', '.join(WORK)}, got {operator!r}")
    return WORK[operator](left, right)


def add(left: int, right: int) -> Worked:
    width = max(len(str(left)), len(str(right)))
    lines, written, carry = [f"{left} + {right}"], [], 0
    for column, (top, bottom) in enumerate(zip(digits(left, width), digits(right, width), strict=True)):
        carried = f"+{carry}" if carry else ""
        total = top + bottom + carry
        carry = _write(f"{top}+{bottom}{carried}={total}", total, column == width - 1, lines, written)
    return _read(f"{left} + {right}", lines, written)


def subtract(left: int, right: int) -> Worked:
    if left < right:
        turned = subtract(right, left)
        lines = (f"{left} - {right}", f"{right} is larger, so the result is negative.", *turned.lines)
        return Worked((*lines, f"{left} - {right} = {-turned.result}"), -turned.result)
    width = len(str(left))
    lines, written, borrow = [f"{left} - {right}"], [], 0
    for top, bottom in zip(digits(left, width), digits(right, width), strict=True):
        borrowed, lacks = (f"-{borrow}" if borrow else ""), top - bottom - borrow < 0
        difference = top - bottom - borrow + (10 if lacks else 0)
        borrow = 1 if lacks else 0
        ten, note = ("+10", ", borrow 1") if lacks else ("", "")
        lines.append(f"{top}{ten}-{bottom}{borrowed}={difference}, write {difference}{note}")
        written.append(str(difference))
    return _read(f"{left} - {right}", lines, written)


def multiply(left: int, right: int) -> Worked:
    """A partial product for each digit of the shorter operand, and their sum."""
    if len(str(left)) < len(str(right)):
        turned = multiply(right, left)
        return Worked((f"{left} × {right} = {right} × {left}", *turned.lines), turned.result, turned.inner)
    factors = [digit * 10**place for place, digit in enumerate(digits(right)) if digit]
    if len(factors) < 2:
        return _partial(left, right)
    lines, total, inner = [f"{left} × {right}"], None, []
    for factor in factors:
        partial = _partial(left, factor)
        lines += partial.lines
        inner.append((left, factor))
        if total is None:
            total = partial.result
            continue
        added = add(total, partial.result)
        inner.append((total, partial.result))
        lines += added.lines
        total = added.result
    return Worked((*lines, f"{left} × {right} = {total}"), total, tuple(inner))


def _partial(left: int, factor: int) -> Worked:
    """`left` times one digit and its zeros."""
    digit, zeros = int(str(factor)[0]), str(factor)[1:]
    width = len(str(left))
    lines, written, carry = [f"{left} × {factor}"], [], 0
    for column, top in enumerate(digits(left)):
        carried = f"+{carry}" if carry else ""
        total = top * digit + carry
        carry = _write(f"{top}×{digit}{carried}={total}", total, column == width - 1, lines, written)
    return _read(f"{left} × {factor}", lines, [zeros, *written])


def digits(number: int, width: int = 0) -> list[int]:
    """Lowest first, filled with zeros up to `width`."""
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def _write(sum_text: str, total: int, is_last: bool, lines: list[str], written: list[str]) -> int:
    """Note one column; the last one writes its whole total. Returns what is carried."""
    carry, digit = (0, total) if is_last else divmod(total, 10)
    written.append(str(digit))
    lines.append(f"{sum_text}, write {digit}" + (f", carry {carry}" if carry else ""))
    return carry


def _read(operation: str, lines: list[str], written: list[str]) -> Worked:
    result = int("".join(reversed(written)))
    return Worked((*lines, f"{operation} = {result}"), result)


WORK = {"+": add, "-": subtract, "×": multiply}
