"""References of a JSON Schema that lead only to themselves: no text fits them, and grammar compilers find out mid-answer."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

# What stands there is a value, not a schema.
VALUES = ("const", "enum", "default", "examples")


def check_refs(schema: Any) -> None:
    """ValueError naming a `$ref` of the document that needs itself before any text of it is written."""
    refs = {part["$ref"] for part in _parts(schema) if isinstance(part.get("$ref"), str)}
    try:
        TopologicalSorter({ref: set(_needed(_target(schema, ref))) for ref in refs}).prepare()
    except CycleError as error:
        raise ValueError(f"$ref {error.args[1][0]} leads only to itself") from None


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in it that may be a schema."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left.extend(value for name, value in part.items() if name not in VALUES)
        elif isinstance(part, list):
            left.extend(part)


def _needed(part: Any) -> Iterator[str]:
    """The references that whatever fits `part` must fit as a whole."""
    left = [part]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for name in ("allOf", "anyOf", "oneOf"):
            inner = part.get(name)
            if isinstance(inner, list) and (name == "allOf" or len(inner) == 1):
                left.extend(inner)


def _target(schema: Any, ref: str) -> Any:
    """What a reference into the document points to; None if to nothing, which is the compiler's to refuse."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found = schema
    for step in unquote(ref).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found
