"""A run as pictures: speedup and acceptance against the tree budget, with the cost model's curve; PNG, and HTML to send."""

from __future__ import annotations

import html
import io
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ddtree.bench.output import AUTO, CHAIN, PLAIN, scoring_of
from ddtree.bench.report import QUIET_CORES, describe_run, notes, run_title

COLOURS = {"trees": "#1f5fa8", "chain": "#4b8b3b", "auto": "#8a5ab5"}
PLAIN_COLOUR, PREDICTED = "#888888", "#d1662b"
BESIDE = 1.05  # where two series meet at a budget, the second stands a little to the right


@dataclass(frozen=True)
class Series:
    """Configurations that belong together: trees by budget, the chain, auto; each with the model's scoring or without the adapter."""

    kind: str  # trees | chain | auto
    scoring: str | None  # factorised; None: the model's own
    label: str
    rows: dict[float, dict]  # place on the axis -> a configuration's row
    predicted: dict[float, float]  # speedups by the cost model

    @property
    def colour(self) -> str:
        return COLOURS[self.kind]

    @property
    def filled(self) -> bool:
        """Hollow where the adapter is left out."""
        return self.scoring is None

    @property
    def style(self) -> dict:
        return {"color": self.colour, "markerfacecolor": self.colour if self.filled else "white"}


def write_plots(result: dict, target: Path) -> list[Path]:
    """A PNG and a page beside it: `bench.png` and `bench.html` in a folder, or what a path that ends in .png names; the files
    written. ValueError for a refused run: it has no numbers."""
    if result["refused"]:
        raise ValueError("a refused run has no speeds to plot; see its reasons")
    image = target if target.suffix == ".png" else target / "bench.png"
    image.parent.mkdir(parents=True, exist_ok=True)
    figure, page = draw(result), image.with_suffix(".html")
    figure.savefig(image, dpi=130)
    vector = io.StringIO()
    figure.savefig(vector, format="svg", metadata={"Date": None})
    page.write_text(render_page(result, vector.getvalue()), encoding="utf-8")
    return [image, page]


def draw(result: dict):
    """The figure: speedup on the left, acceptance length on the right."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: install ddtree[plot]") from None
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    series = series_of(result)
    _draw_speedup(left, series)
    _draw_acceptance(right, series)
    for axes in (left, right):
        _budget_axis(axes, series)
        # Below the axes, where it covers nothing.
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
    others = f"; others kept {result['other_cores']:.1f} cores busy" if (result.get("other_cores") or 0) > QUIET_CORES else ""
    figure.suptitle(run_title(result) + others, fontsize=10)
    return figure


def series_of(result: dict) -> list[Series]:
    """The run's configurations, plain decoding aside, in the order in which they are drawn."""
    rows, places = defaultdict(dict), defaultdict(dict)
    for config, row in result["configs"].items():
        name, scoring = scoring_of(config)
        kind = name if name in (CHAIN, AUTO) else "trees"
        # A chain verifies block_size - 1 nodes: that is its budget.
        budget = 0 if kind == AUTO else (result.get("block_size") or 1) - 1 if kind == CHAIN else int(name)
        if config != PLAIN:
            rows[kind, scoring][budget], places[kind, scoring][budget] = row, config
    found, predicted = [], result.get("predicted", {})
    for kind, scoring in sorted(rows, key=lambda key: (["trees", CHAIN, AUTO].index(key[0]), key[1] or "")):
        shift = BESIDE if scoring and (kind, None) in rows else 1
        budgets = sorted(rows[kind, scoring])
        known = {b: predicted[places[kind, scoring][b]] for b in budgets if places[kind, scoring][b] in predicted}
        name = f"chain of {budgets[0]}" if kind == CHAIN else kind
        ranking = scoring or result.get("scoring")
        label = f"{name}, {ranking}" if {scoring for _, scoring in rows} != {None} or ranking == "conditioned" else name
        found.append(
            Series(
                kind,
                scoring,
                label,
                {shift * budget: rows[kind, scoring][budget] for budget in budgets},
                {shift * budget: point["speedup"] for budget, point in known.items()},
            )
        )
    return found


def _draw_speedup(axes, series: list[Series]) -> None:
    axes.axhline(1, color=PLAIN_COLOUR, linewidth=1, linestyle="--", label="plain decoding (budget 0)")
    named = False
    for each in series:
        if each.kind == AUTO:
            (row,) = each.rows.values()
            axes.axhline(row["speedup"]["pooled"], label=f"{each.label}, 95 % interval", **_line(each))
            axes.axhspan(*row["speedup"]["interval"], color=each.colour, alpha=0.12, linewidth=0)
            continue
        _points(axes, each)
        if each.predicted:
            label = f"predicted, {each.label}" if named else "predicted: acceptance x T_plain / T_round"
            look = {"color": PREDICTED, "marker": "x", "linestyle": "none"}
            if each.kind == "trees":
                look |= {"marker": ".", "linestyle": "-" if each.filled else "--"}
            axes.plot(list(each.predicted), list(each.predicted.values()), label=label, zorder=3, **look)
            named = True
    axes.set_title("speedup over plain decoding")
    axes.set_ylim(bottom=0)


def _draw_acceptance(axes, series: list[Series]) -> None:
    for each in series:
        lengths = [row["acceptance_length"] for row in each.rows.values()]
        if each.kind == AUTO:
            axes.axhline(lengths[0], label=each.label, **_line(each))
        else:
            look = "D" if each.kind == CHAIN else "o-" if each.filled else "o--"
            axes.plot(list(each.rows), lengths, look, label=each.label, **each.style)
    axes.axhline(1, color=PLAIN_COLOUR, linewidth=1, linestyle="--", label="plain decoding: 1")
    axes.set_title("acceptance length (tokens per round, bonus included)")
    axes.set_ylim(bottom=0)


def _line(each: Series) -> dict:
    return {"color": each.colour, "linewidth": 1.5, "linestyle": "-." if each.filled else ":"}


def _points(axes, each: Series) -> None:
    middle = [row["speedup"]["pooled"] for row in each.rows.values()]
    intervals = [row["speedup"]["interval"] for row in each.rows.values()]
    # The bootstrap's interval need not contain the pooled value exactly.
    low = [max(value - interval[0], 0) for value, interval in zip(middle, intervals, strict=True)]
    high = [max(interval[1] - value, 0) for value, interval in zip(middle, intervals, strict=True)]
    marker = "o" if each.kind == "trees" else "D"
    axes.errorbar(list(each.rows), middle, yerr=[low, high], fmt=marker, capsize=3, label=f"{each.label}, 95 % interval", **each.style)


def _budget_axis(axes, series: list[Series]) -> None:
    axes.set_xlabel("tree budget (drafted nodes per round)")
    axes.grid(alpha=0.25)
    trees = sorted({budget for each in series if each.kind == "trees" and each.filled for budget in each.rows})
    every = [budget for each in series if each.kind != AUTO for budget in each.rows]
    if every:
        axes.set_xscale("log", base=2)
        ticks = trees or sorted(every)  # the chain's place would crowd the budget beside it
        axes.set_xticks(ticks, [f"{budget:g}" for budget in ticks])
        axes.minorticks_off()
        axes.set_xlim(min(every) / 1.4, max(every) * 1.4)


def render_page(result: dict, picture: str) -> str:
    """One self-contained page: the picture, the table, what the numbers depend on, and the JSON itself."""
    picture = picture[picture.index("<svg") :]
    rows = "\n".join(_table_row(config, row) for config, row in result["configs"].items())
    facts = "\n".join(f"<li>{html.escape(line)}</li>" for line in [*describe_run(result), *notes(result)])
    data = html.escape(json.dumps(result, indent=1))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>ddtree bench: {html.escape(result["model"])}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
svg {{ max-width: 100%; height: auto; }} .scroller {{ overflow-x: auto; }} p, li {{ overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .25rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }}
pre {{ overflow: auto; max-height: 30rem; background: #f6f6f6; padding: 1rem; }}
</style></head><body><main>
<h1>ddtree bench: {html.escape(result["model"])}</h1>
{picture}
<div class="scroller" tabindex="0"><table><tr><th>budget</th><th>tokens/s</th><th>95 %</th><th>speedup</th><th>95 %</th><th>acceptance length</th>
<th>TTFT ms</th><th>TPOT ms</th><th>ITL ms</th></tr>
{rows}
</table></div>
<h2>What these numbers depend on</h2>
<ul>
{facts}
</ul>
<p><code>{html.escape(result["command"])}</code></p>
<details><summary>The result as JSON</summary><pre tabindex="0">{data}</pre></details>
</main></body></html>
"""


def _table_row(config: str, row: dict) -> str:
    speed, speedup = row["tokens_per_s"], row["speedup"]
    cells = [
        "0 (plain)" if config == "0" else config,
        f"{speed['pooled']:.1f}",
        "{:.1f} - {:.1f}".format(*speed["interval"]),
        f"{speedup['pooled']:.2f}",
        "" if config == "0" else "{:.2f} - {:.2f}".format(*speedup["interval"]),
        "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
        *(
            "-" if row[name] is None else f"{row[name]['median']:.1f}"
            for name in ("ttft_ms", "tpot_ms", "itl_ms")
        ),
    ]
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
