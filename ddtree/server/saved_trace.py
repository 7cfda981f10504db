"""Rounds of a saved trace: read from a stream or an audit's lines, and checked, so that a page can be drawn of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator

STAGES = ("draft", "build", "verify", "accept", "commit")
FORMS = 'give lines of "ddtree audit --trace", or a stream that was asked for with "ddtree_trace": true'
REMEDY = f"save the trace whole and as it came, or {FORMS}"


def read_rounds(lines: Iterable[str]) -> dict[str, list[dict]]:
    """Rounds by the choice or prompt that they belong to; ValueError names the line, the field and the value that is wrong.

    Lines are rounds, or chunks of a stream as they came (`data: {...}`), of which those without a trace are passed over.
    """
    groups: dict[str, list[dict]] = {}
    for number, line in enumerate(lines, start=1):
        for found in _rounds_in(line.strip(), number):
            name = str(found["prompt_id"]) if "prompt_id" in found else f"choice {found.get('index', 0)}"
            groups.setdefault(name, []).append(_complete(found, number))
    if not groups:
        raise ValueError(f"no round in it: {FORMS}")
    return groups


def _rounds_in(line: str, number: int) -> Iterator[dict]:
    line = line.removeprefix("data:").strip()
    if not line or line == "[DONE]" or line.startswith((":", "event:")):
        return
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON ({error}): {FORMS}") from None
    if not isinstance(found, dict):
        raise ValueError(f"line {number} is not an object: {FORMS}")
    # A chunk of a stream; its end may be an error.
    if not found.keys().isdisjoint(("choices", "ddtree_trace", "error")):
        found = found.get("ddtree_trace")
        if found is None:
            return
        if not isinstance(found, dict):
            raise ValueError(f"line {number}: ddtree_trace must be an object, got {_shown(found)}: {REMEDY}")
    yield found


def _complete(found: dict, number: int) -> dict:
    """The round with what only streams say filled in."""
    missing = [name for name in ("token_ids", "parents", "path", "emitted") if not found.get(name)]
    if missing:
        raise ValueError(f"line {number} has no {', '.join(missing)}: {FORMS}")

    def check(name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"line {number}: {name} must {what}, got {_shown(found.get(name))}: {REMEDY}")

    _check_tree(found, check)
    emitted = found["emitted"]
    token_ids = found["token_ids"]
    filled = {
        "tokens": [f"#{token_id} " for token_id in token_ids],
        "probabilities": [0.0] * len(token_ids),
        "bonus_token": {"token_id": emitted[-1], "token": f"#{emitted[-1]} "},
        "stage_ms": dict.fromkeys(STAGES, 0.0),
        "round_ms": 0.0,
        "round": number,
    }
    _check_rest(found := filled | found, check)
    return found | {"depths": _depths(found["parents"])}


def _check_tree(found: dict, check: Callable[[str, bool, str], None]) -> None:
    """Token ids, parents, path and emitted fit each other."""
    token_ids, parents, path, emitted = (found[name] for name in ("token_ids", "parents", "path", "emitted"))
    check("token_ids", _all(token_ids, _is_count), "be token ids")
    size = len(token_ids)
    check("parents", _all(parents, _is_int, size), f"have {size} numbers, one for each of token_ids")
    fit = parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
    check("parents", fit, "be -1 for the root and name one earlier node for each other")
    check("path", _all(path, _is_count) and max(path) < size, f"name nodes below {size}")
    walked = path[0] == 0 and [parents[node] for node in path[1:]] == path[:-1]
    check("path", walked, "begin at node 0 and go from parent to child")
    fit = _all(emitted, _is_count) and len(emitted) <= len(path)
    check("emitted", fit, f"be at most {len(path)} token ids, those of the path and the bonus token's")


def _check_rest(found: dict, check: Callable[[str, bool, str], None]) -> None:
    """What is shown of the tree: texts, probabilities, times."""
    size = len(found["token_ids"])
    check("tokens", _all(found["tokens"], lambda each: isinstance(each, str), size), f"have {size} texts, one for each of token_ids")
    fit = _all(found["probabilities"], lambda each: _is_time(each) and each <= 1, size)
    check("probabilities", fit, f"have {size} numbers from 0 to 1, one for each of token_ids")
    bonus = found["bonus_token"]
    check("bonus_token", isinstance(bonus, dict) and isinstance(bonus.get("token"), str), 'be {"token_id": id, "token": text}')
    times = found["stage_ms"]
    fit = isinstance(times, dict) and all(_is_time(times.get(stage)) for stage in STAGES)
    check("stage_ms", fit, f"have milliseconds for {', '.join(STAGES)}")
    check("round_ms", _is_time(found["round_ms"]), "be milliseconds")
    check("round", _is_count(found["round"]), "be the round's number")


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _all(values: object, holds: Callable[[object], bool], size: int | None = None) -> bool:
    return isinstance(values, list) and size in (None, len(values)) and all(map(holds, values))


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_count(value: object) -> bool:
    return _is_int(value) and value >= 0


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _shown(value: object) -> str:
    """The value, or its beginning and its size."""
    text = json.dumps(value)
    size = f" ({len(value)} in all)" if isinstance(value, list) else ""
    return text if len(text) <= 80 else f"{text[:80]}…{size}"
