"""Two runs side by side, with a verdict that respects the spread: intervals that overlap show no difference."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Where these differ, the runs measured different things.
CIRCUMSTANCES = (
    "model",
    "drafter",
    "scoring",
    "dtype",
    "batch_invariant",
    "device",
    "thinking",
    "temperature",
    "seed",
    "eos_policy",
    "max_tokens",
    "timed_items",
    "prompt_tokens",
    "output_tokens",
    "concurrency",
    "rate",
)
NO_DIFFERENCE = "no difference shown"
MEASURES = ("tokens_per_s", "speedup")


def compare(before: dict, after: dict) -> dict:
    """Per configuration and measure, the change and what it shows. ValueError if one of the runs was refused."""
    for name, result in (("first", before), ("second", after)):
        if result.get("refused", True):
            raise ValueError(f"the {name} run was refused: it has no speeds to compare")
    shared = [config for config in before["configs"] if config in after["configs"]]
    if not shared:
        raise ValueError("the two runs have no configuration in common")
    return {
        "differs_in": {
            name: [before.get(name), after.get(name)]
            for name in CIRCUMSTANCES
            if before.get(name) != after.get(name)
        },
        "configs": {
            config: {
                name: _change(before["configs"][config][name], after["configs"][config][name])
                for name in MEASURES
            }
            for config in shared
        },
    }


def read_result(path: Path) -> dict:
    """A result written by --out, or a log whose last line is one."""
    text = path.read_text(encoding="utf-8")
    try:
        result = json.loads(text)
    except ValueError:
        try:
            result = json.loads(text.splitlines()[-1])
        except (ValueError, IndexError):
            raise ValueError(f"{path}: neither it nor its last line is the JSON of ddtree bench") from None
    if not isinstance(result, dict) or "refused" not in result:
        raise ValueError(f"{path}: not a result of ddtree bench")
    return result


def show_comparison(found: dict, names: tuple[str, str], console: Console) -> None:
    """The table, a warning where unlike was compared, and the JSON line."""
    table = Table(title=f"{names[0]} against {names[1]}: pooled, 95 % interval", title_justify="left")
    for head in ("budget", "measure", "first", "second", "change", "verdict"):
        table.add_column(head, justify="left" if head in ("measure", "verdict") else "right")
    for config, row in found["configs"].items():
        for name, each in row.items():
            if config == "0" and name == "speedup":
                continue
            change = f"{each['change_percent']:+.1f} %"
            table.add_row(config, name, _cell(each["before"]), _cell(each["after"]), change, each["verdict"])
    console.print(table)
    for name, (one, other) in found["differs_in"].items():
        console.print(f"- the runs differ in {name}: {one} and {other}", markup=False)
    console.file.write(json.dumps(found, allow_nan=False) + "\n")
    console.file.flush()


def _change(before: dict, after: dict) -> dict:
    (low, high), (new_low, new_high) = before["interval"], after["interval"]
    verdict = "faster" if new_low > high else "slower" if new_high < low else NO_DIFFERENCE
    return {
        "before": {name: before[name] for name in ("pooled", "interval")},
        "after": {name: after[name] for name in ("pooled", "interval")},
        "change_percent": round(100 * (after["pooled"] / before["pooled"] - 1), 2),
        "verdict": verdict,
    }


def _cell(estimate: dict) -> str:
    return "{:.2f} ({:.2f} - {:.2f})".format(estimate["pooled"], *estimate["interval"])
