"""A run as pictures: speedup and acceptance against the tree budget, with the cost model's curve; PNG, and HTML to send."""

from __future__ import annotations

import html
import io
import json
from pathlib import Path

from ddtree.bench.report import QUIET_CORES, describe_run, notes, run_title

MEASURED, MODEL, CHAIN_COLOUR, PLAIN_COLOUR = "#1f5fa8", "#d1662b", "#4b8b3b", "#888888"


def write_plots(result: dict, folder: Path) -> list[Path]:
    """`bench.png` and `bench.html` in `folder`; the files written. ValueError for a refused run: it has no numbers."""
    if result["refused"]:
        raise ValueError("a refused run has no speeds to plot; see its reasons")
    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(result)
    image, page = folder / "bench.png", folder / "bench.html"
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
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    trees = {int(name): row for name, row in result["configs"].items() if name.isdigit() and name != "0"}
    _draw_speedup(left, result, trees)
    _draw_acceptance(right, result, trees)
    for axes in (left, right):
        _budget_axis(axes, list(trees), _chain_at(result))
    others = f"; others kept {result['other_cores']:.1f} cores busy" if (result.get("other_cores") or 0) > QUIET_CORES else ""
    figure.suptitle(run_title(result) + others, fontsize=10)
    return figure


def _draw_speedup(axes, result: dict, trees: dict[int, dict]) -> None:
    axes.axhline(1, color=PLAIN_COLOUR, linewidth=1, linestyle="--", label="plain decoding (budget 0)")
    predicted = {int(b): point["speedup"] for b, point in result.get("predicted", {}).items() if b != "0"}
    if predicted:
        label = "predicted: acceptance x T_plain / T_round"
        axes.plot(list(predicted), list(predicted.values()), color=MODEL, marker=".", label=label)
    _points(axes, list(trees), list(trees.values()), MEASURED, "measured, 95 % interval")
    chain = result["configs"].get("chain")
    if chain:
        _points(axes, _chain_at(result), [chain], CHAIN_COLOUR, "chain, 95 % interval")
    axes.set_title("speedup over plain decoding")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _draw_acceptance(axes, result: dict, trees: dict[int, dict]) -> None:
    lengths = [row["acceptance_length"] for row in trees.values()]
    axes.plot(list(trees), lengths, color=MEASURED, marker="o", label="trees")
    chain = result["configs"].get("chain")
    if chain:
        axes.plot(_chain_at(result), [chain["acceptance_length"]], "D", color=CHAIN_COLOUR, label="chain")
    axes.axhline(1, color=PLAIN_COLOUR, linewidth=1, linestyle="--", label="plain decoding: 1")
    axes.set_title("acceptance length (tokens per round, bonus included)")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _legend(axes) -> None:
    """Below the axes, where it covers nothing."""
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)


def _points(axes, at: list, rows: list[dict], colour: str, label: str) -> None:
    middle = [row["speedup"]["pooled"] for row in rows]
    # The bootstrap's interval need not contain the pooled value exactly.
    low = [max(value - row["speedup"]["interval"][0], 0) for value, row in zip(middle, rows, strict=True)]
    high = [max(row["speedup"]["interval"][1] - value, 0) for value, row in zip(middle, rows, strict=True)]
    axes.errorbar(at, middle, yerr=[low, high], fmt="o", color=colour, capsize=3, label=label)


def _chain_at(result: dict) -> list[int]:
    """A chain verifies block_size - 1 nodes: that is its budget."""
    return [result["block_size"] - 1] if "chain" in result["configs"] and result.get("block_size") else []


def _budget_axis(axes, trees: list[int], chain: list[int]) -> None:
    axes.set_xlabel("tree budget (drafted nodes per round)")
    axes.grid(alpha=0.25)
    if trees or chain:
        axes.set_xscale("log", base=2)
        ticks = sorted(trees or chain)  # the chain's place would crowd the budget beside it
        axes.set_xticks(ticks, [str(budget) for budget in ticks])
        axes.minorticks_off()
        axes.set_xlim(min(trees + chain) / 1.4, max(trees + chain) * 1.4)


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
