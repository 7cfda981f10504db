"""A check: what was looked at, what was found, and what to do where it is not well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """One line of the table. `remedy` is empty only where nothing is to be done."""

    area: str
    name: str
    status: str
    found: str
    remedy: str = ""


def passed_or_failed(area: str, name: str, passed: bool, found: str, remedy: str) -> Check:
    """`remedy` is shown only where it is needed."""
    return Check(area, name, OK if passed else FAILED, found, "" if passed else remedy)


def guarded(area: str, name: str, work: Callable[[], str], remedy: str) -> Check:
    """What `work` found, or the error that it raised."""
    try:
        return Check(area, name, OK, work())
    except Exception as error:  # a doctor reports whatever is broken
        return Check(area, name, FAILED, f"{type(error).__name__}: {error}", remedy)
