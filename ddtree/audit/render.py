"""The HTML report: the verdict, what differs, what is wrong where, and the trees of the inspected rounds as drawings."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

from ddtree.audit.findings import Result
from ddtree.audit.watch import Record

MOST_NODES = 90  # drawn; larger trees are cut, best nodes first
MOST_TREES = 12
WIDTH, HEIGHT = 104, 34  # of a node's cell, in pixels
LETTERS = 11  # of a node's number and token that fit its box
FACTS = ("prompts", "tokens", "runs", "budgets", "temperatures", "noise", "near_tie_limit")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1c2430; background: #fff; overflow-wrap: anywhere }
.scroller { overflow-x: auto } dl { display: flex; flex-wrap: wrap; gap: .3rem 2rem } dt { color: #566073; font-size: .85rem } dd { margin: 0 }
th, td { overflow-wrap: normal } td:nth-child(4), td:nth-child(5) { white-space: pre }
table { border-collapse: collapse; margin: 1rem 0 } th, td { text-align: left; padding: .3rem .8rem; border-bottom: 1px solid #d8dde5 }
h1 span { padding: .1rem .6rem; border-radius: .4rem; color: #fff } .identical, .near_tie { background: #1b7f4b } .mismatch { background: #b3261e }
svg { border: 1px solid #d8dde5; border-radius: .4rem } svg text { font: 11px ui-monospace, monospace }
.fault { color: #b3261e }
"""


def render(result: Result, inspections, text_of: Callable[[int], str], title: str) -> str:
    """The whole report as one HTML page without anything from elsewhere."""
    found = result.as_json()
    rows = "".join(
        f"<tr><td>{escape(each['prompt_id'])} ({each['form']}{_switch(each['thinking'])})</td><td>{escape(each['against'])}</td><td>{each['position']}</td>"
        f"<td>{escape(each['plain_token'])}</td><td>{escape(each['other_token'])}</td><td>{each['margin']}</td>"
        f"<td>{each['verdict']}</td><td>{escape(each['where'])}</td></tr>"
        for each in found["divergences"]
    )
    faults = "".join(f"<li class=fault>{escape(fault.where)} <small>({escape(fault.kind)})</small></li>" for fault in result.faults)
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    drawings = "".join(_round(*each, text_of) for each in _chosen(inspections))
    facts = "".join(f"<div><dt>{key.replace('_', ' ')}</dt><dd>{escape(_shown(found[key]))}</dd></div>" for key in FACTS)
    return (
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><main>"
        f"<h1>{escape(title)} <span class={result.verdict}>{result.verdict.replace('_', ' ')}</span></h1>"
        f"<p>Drafter: {result.drafter.replace('_', ' ')}.</p>"
        f"<dl>{facts}</dl>"
        + (f"<h2>Faults</h2><ul>{faults}</ul>" if faults else "<p>No fault was found.</p>")
        + (f"<ul>{notes}</ul>" if notes else "")
        + (
            "<h2>Divergences</h2><div class=scroller tabindex=0><table>"
            "<tr><th>prompt<th>against<th>position<th>plain<th>other<th>margin<th>verdict<th>where</tr>"
            f"{rows}</table></div>"
            if rows
            else "<p>No output differs.</p>"
        )
        + f"<h2>Inspected rounds</h2><p>Green: the accepted path. Red: what a fault names.</p>{drawings or '<p>None.</p>'}</main></html>"
    )


def _shown(value) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else f"{value:.3g}" if isinstance(value, float) else str(value)


def _switch(thinking: bool | None) -> str:
    return "" if thinking is None else f", thinking {'on' if thinking else 'off'}"


def _chosen(inspections) -> list[tuple[str, Record, list[str]]]:
    """Rounds with a tree, and what is wrong in them; of inspections that found a fault the last one, where it was found."""
    chosen, seen = [], set()
    for name, inspection in sorted(inspections, key=lambda each: not each[1].faults):
        rounds = [record for record in inspection.records if record.tree is not None and record.tree.num_drafted]
        for record in rounds[-1:] if inspection.faults else rounds[:2]:
            # Several drafters may have drafted the same.
            mark = (name, len(record.tokens_before), record.tree.token_ids.tobytes(), record.tree.parents.tobytes())
            if mark not in seen:
                chosen.append((name, record, [fault.where for fault in inspection.faults]))
            seen.add(mark)
    return chosen[:MOST_TREES]


def _round(name: str, record: Record, wrong: list[str], text_of) -> str:
    path = [] if record.path is None else record.path.tolist()
    emitted = "".join(text_of(token_id) for token_id in record.emitted)
    named = {int(node) for where in wrong for node in re.findall(r"\b(?:node|sibling) (\d+)", where)}
    faults = "".join(f"<p class=fault>{escape(where)}</p>" for where in wrong)
    return (
        f"<h3>{escape(name)}, after {len(record.tokens_before)} tokens: acceptance length {len(path)}, emitted "
        f"<code>{escape(repr(emitted))}</code></h3>{faults}<div class=scroller tabindex=0>{draw(record.tree, path, text_of, named)}</div>"
    )


def draw(tree, path: list[int], text_of: Callable[[int], str], wrong: set[int] = frozenset()) -> str:
    """The tree from left to right as SVG; the accepted path is thick and green, nodes of `wrong` are red."""
    nodes = sorted({*range(min(tree.num_nodes, MOST_NODES)), *path})
    lines = _lines(tree, nodes)
    depth = max(int(tree.depths[node]) for node in nodes)
    place = {node: (10 + int(tree.depths[node]) * WIDTH, 8 + lines[node] * HEIGHT) for node in nodes}
    edges, boxes = [], []
    for node in nodes:
        x, y = place[node]
        kept = node in path
        colour = "#1b7f4b" if kept else "#9aa4b2"
        parent = int(tree.parents[node])
        if parent in place:
            px, py = place[parent]
            width = 3 if kept else 1
            edges.append(
                f'<path d="M{px + WIDTH - 22} {py + 11} L{x} {y + 11}" stroke="{colour}" stroke-width="{width}" fill="none"/>'
            )
        words = f"{node}:{repr(text_of(int(tree.token_ids[node])))[1:-1]}"
        shown = escape(words if len(words) <= LETTERS else f"{words[: LETTERS - 1]}…")
        frame = 'stroke="#b3261e" stroke-width="3"' if node in wrong else f'stroke="{colour}"'
        boxes.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH - 22}" height="22" rx="4" fill="{"#e3f4ea" if kept else "#f4f6f9"}" '
            f'{frame}/><text x="{x + 4}" y="{y + 15}">{shown}</text>'
        )
    width, height = 20 + (depth + 1) * WIDTH, 16 + (max(lines.values()) + 1) * HEIGHT
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">{"".join(edges)}{"".join(boxes)}</svg>'


def _lines(tree, nodes: list[int]) -> dict[int, int]:
    """Each node's line: a first child shares its parent's, every other child begins a new one."""
    children: dict[int, list[int]] = {}
    for node in nodes[1:]:
        children.setdefault(int(tree.parents[node]), []).append(node)
    lines, used, stack = {}, 0, [(0, 0)]
    while stack:
        node, line = stack.pop()
        if line < 0:
            used += 1
            line = used
        lines[node] = line
        below = children.get(node, [])
        stack += [(child, -1) for child in reversed(below[1:])]
        stack += [(below[0], line)] if below else []
    return lines
