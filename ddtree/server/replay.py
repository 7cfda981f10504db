"""A saved trace as one HTML page: the chat page's panel with the rounds inside, so that it opens anywhere."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files

MODULES = ("dom.js", "characters.js", "tree.js", "rounds.js", "panel.js", "replay.js")  # in the order in which they need each other
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


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


def _file(name: str) -> str:
    return files("ddtree.server").joinpath("ui", name).read_text("utf-8")
