"""A saved trace as one HTML page: the chat page's panel with the rounds inside, so that it opens anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files

MODULES = ("dom.js", "tree.js", "rounds.js", "panel.js", "replay.js")  # in the order in which they need each other
NEEDED = ("token_ids", "parents", "path", "emitted")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
FORMS = 'lines of "ddtree audit --trace", or a stream that was asked for with "ddtree_trace": true'


def read_rounds(lines: Iterable[str]) -> dict[str, list[dict]]:
    """Rounds by the choice or prompt that they belong to; ValueError names the line that is none.

    Lines are rounds, or chunks of a stream as they came (`data: {...}`), of which those without a trace are passed over.
    """
    groups: dict[str, list[dict]] = {}
    for number, line in enumerate(lines, start=1):
        for found in _rounds_in(line.strip(), number):
            name = str(found.get("prompt_id", f"choice {found.get('index', 0)}"))
            groups.setdefault(name, []).append(_complete(found, number))
    if not groups:
        raise ValueError(f"no round in it: give {FORMS}")
    return groups


def replay_page(groups: dict[str, list[dict]], title: str) -> str:
    """The page. What the trace says enters as JSON alone, which cannot end its element."""
    data = json.dumps([{"name": name, "rounds": rounds} for name, rounds in groups.items()]).replace("<", "\\u003c")
    panel = re.search(r"<aside.*</aside>", _file("index.html"), re.DOTALL).group()
    script = "\n".join(re.sub(r"^import .*$", "", _file(name), flags=re.MULTILINE) for name in MODULES)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title><style>{_file("style.css")}</style></head><body>
<header><h1>{escape(title)}</h1><nav aria-label="Replay">
<label>Choice <select id="group"></select></label>
<label>Pace <select id="pace"><option value="0">slow</option><option value="1" selected>middling</option>
<option value="2">fast</option></select></label><button id="play" type="button">Play</button></nav></header>
{panel}
<main><h2>Text, shaded by round</h2><div id="text" class="text plain replayed" tabindex="0" role="region" aria-label="Text"></div></main>
<script type="application/json" id="trace">{data}</script>
<script type="module">{script}</script></body></html>
"""


def _rounds_in(line: str, number: int) -> Iterator[dict]:
    line = line.removeprefix("data:").strip()
    if not line or line == "[DONE]" or line.startswith((":", "event:")):
        return
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON ({error}): give {FORMS}") from None
    if not isinstance(found, dict):
        raise ValueError(f"line {number} is not an object: give {FORMS}")
    if "choices" in found or "ddtree_trace" in found:
        if "ddtree_trace" in found:
            yield found["ddtree_trace"]
        return
    yield found


def _complete(found: dict, number: int) -> dict:
    """The round with what only streams say filled in."""
    missing = [name for name in NEEDED if not found.get(name)]
    if missing:
        raise ValueError(f"line {number} has no {', '.join(missing)}: give {FORMS}")
    token_ids, parents = found["token_ids"], found["parents"]
    if len(token_ids) != len(parents) or any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise ValueError(f"line {number}: parents must name one earlier node for each of {len(token_ids)} tokens")
    if not all(isinstance(node, int) and 0 <= node < len(parents) for node in found["path"]):
        raise ValueError(f"line {number}: path must name nodes below {len(parents)}, got {found['path']}")
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    bonus = found["emitted"][-1]
    return {
        "tokens": [f"#{token_id} " for token_id in token_ids],
        "probabilities": [0.0] * len(parents),
        "bonus_token": {"token_id": bonus, "token": f"#{bonus} "},
        "stage_ms": dict.fromkeys(("draft", "build", "verify", "accept", "commit"), 0.0),
        "round": number,
    } | found | {"depths": depths}


def _file(name: str) -> str:
    return files("ddtree.server").joinpath("ui", name).read_text("utf-8")
