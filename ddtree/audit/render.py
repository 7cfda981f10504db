"""The HTML report: the verdict, what differs, what is wrong where, and the trees of the inspected rounds as drawings."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape

from ddtree.audit.findings import Result
from ddtree.audit.watch import Record

MOST_NODES = 90  # drawn; larger trees are cut, best nodes first
MOST_TREES = 12
WIDTH, HEIGHT = 92, 34  # of a node's cell, in pixels
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1c2430 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { text-align: left; padding: .3rem .8rem; border-bottom: 1px solid #d8dde5 }
h1 span { padding: .1rem .6rem; border-radius: .4rem; color: #fff } .identical, .near_tie { background: #1b7f4b } .mismatch { background: #b3261e }
svg { border: 1px solid #d8dde5; border-radius: .4rem; max-width: 100%; height: auto } svg text { font: 11px ui-monospace, monospace }
li.fault { color: #b3261e }
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
    drawings = "".join(_round(name, record, text_of) for name, record in _chosen(inspections))
    facts = {key: found[key] for key in ("prompts", "tokens", "runs", "budgets", "temperatures", "noise", "near_tie_limit")}
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{escape(title)} <span class={result.verdict}>{result.verdict.replace('_', ' ')}</span></h1>"
        f"<p>Drafter: {result.drafter.replace('_', ' ')}.</p>"
        f"<p>{escape(json.dumps(facts))}</p>"
        + (f"<h2>Faults</h2><ul>{faults}</ul>" if faults else "<p>No fault was found.</p>")
        + (f"<ul>{notes}</ul>" if notes else "")
        + (
            "<h2>Divergences</h2><table><tr><th>prompt<th>against<th>position<th>plain<th>other<th>margin<th>verdict<th>where</tr>"
            f"{rows}</table>"
            if rows
            else "<p>No output differs.</p>"
        )
        + f"<h2>Inspected rounds</h2>{drawings or '<p>None.</p>'}</html>"
    )


def _switch(thinking: bool | None) -> str:
    return "" if thinking is None else f", thinking {'on' if thinking else 'off'}"


def _chosen(inspections) -> list[tuple[str, Record]]:
    """Rounds with a tree; of inspections that found a fault the last one, where it was found."""
    chosen = []
    for name, inspection in sorted(inspections, key=lambda each: not each[1].faults):
        rounds = [record for record in inspection.records if record.tree is not None and record.tree.num_drafted]
        chosen += [(name, record) for record in (rounds[-1:] if inspection.faults else rounds[:2])]
    return chosen[:MOST_TREES]


def _round(name: str, record: Record, text_of) -> str:
    path = [] if record.path is None else record.path.tolist()
    emitted = "".join(text_of(token_id) for token_id in record.emitted)
    return (
        f"<h3>{escape(name)}, after {len(record.tokens_before)} tokens: {len(path)} accepted, emitted "
        f"<code>{escape(repr(emitted))}</code></h3>{draw(record.tree, path, text_of)}"
    )


def draw(tree, path: list[int], text_of: Callable[[int], str]) -> str:
    """The tree from left to right as SVG; the accepted path is thick and green."""
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
        shown = escape(repr(text_of(int(tree.token_ids[node])))[1:-1][:9])
        boxes.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH - 22}" height="22" rx="4" fill="{"#e3f4ea" if kept else "#f4f6f9"}" '
            f'stroke="{colour}"/><text x="{x + 4}" y="{y + 15}">{node}:{shown}</text>'
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
