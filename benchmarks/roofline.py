"""Each stage of a round beside its floor: the least time that its bytes and its arithmetic allow on the measured card.

    python -m benchmarks.roofline benchmarks/results/h200-qwen3.6-27b.json --plot roofline.png

Reads what `benchmarks.rounds` wrote. A stage's floor is the larger of two times: the weights it must read, each once, over the measured
copy bandwidth; its products' operations over the measured rate of a large matrix product. Build, accept and commit read
next to nothing: their floor is 0. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

STAGES = ("draft", "build", "verify", "accept", "commit")
COLOURS = ("#7b9fd4", "#c9b458", "#3f6fb5", "#8a8a8a", "#c97b58")


def floors(result: dict, budget: int) -> dict[str, float]:
    """Milliseconds of draft and verify by bytes and by operations."""
    sizes, bandwidth, rate = result["weight_bytes"], result["copy_bytes_per_s"], result["matrix_flops_per_s"]
    drafted, rows = result["block_size"], budget + 1
    draft_bytes = sizes["drafter"] + sizes["head"]
    # Two bytes and two operations a weight and row: as many operations per row as bytes.
    return {
        "draft": 1000 * max(draft_bytes / bandwidth, draft_bytes * drafted / rate),
        "verify": 1000 * max(sizes["target"] / bandwidth, sizes["target"] * rows / rate),
    }


def table(result: dict) -> list[dict]:
    """One row per budget: stages, their floors, the round and its efficiency."""
    rows = []
    for budget, stages in result["stage_ms"].items():
        floor = floors(result, int(budget))
        rows.append(
            {
                "budget": int(budget),
                "stage_ms": {name: stages[name]["median"] for name in STAGES},
                "floor_ms": {name: round(value, 3) for name, value in floor.items()},
                "round_ms": result["round_ms"][budget]["median"],
                "round_floor_ms": round(sum(floor.values()), 3),
                "round_efficiency": result["round_efficiency"][budget]["median"],
            }
        )
    return rows


def show(result: dict, rows: list[dict]) -> None:
    print(f"{result['card']}, {result['shapes']}")
    plain, floor = result["plain_ms"]["median"], 1000 * result["weight_bytes"]["target"] / result["copy_bytes_per_s"]
    print(f"copies {result['copy_bytes_per_s'] / 1e12:.2f} TB/s, products {result['matrix_flops_per_s'] / 1e12:.0f} TFLOP/s")
    print(f"plain step {plain:.2f} ms, floor {floor:.2f}: {100 * floor / plain:.0f} %")
    print("budget  " + "  ".join(f"{name:>16}" for name in STAGES) + f"  {'round':>14}  {'efficiency':>10}")
    for row in rows:
        cells = []
        for name in STAGES:
            least = row["floor_ms"].get(name)
            cells.append(f"{row['stage_ms'][name]:8.3f}" + (f" ({least:5.2f})" if least else " " * 8))
        print(f"{row['budget']:6}  " + "  ".join(cells) + f"  {row['round_ms']:6.2f} ({row['round_floor_ms']:5.2f})  {row['round_efficiency']:10.3f}")
    print("in brackets: floors")


def plot(result: dict, rows: list[dict], path: Path) -> None:
    """Stacked stages per budget beside the floor; plain decoding as the first bar."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.6))
    plain = result["plain_ms"]["median"]
    least = 1000 * result["weight_bytes"]["target"] / result["copy_bytes_per_s"]
    axis.bar(0, plain, color=COLOURS[2])
    axis.hlines(least, -0.45, 0.45, color="black", linewidth=2, label="floor: bytes and operations")
    axis.text(0, plain + 0.2, f"{plain:.1f}", ha="center", fontsize=9)
    for x, row in enumerate(rows, 1):
        bottom = 0.0
        for name, colour in zip(STAGES, COLOURS, strict=True):
            height = row["stage_ms"][name]
            axis.bar(x, height, bottom=bottom, color=colour, label=name if x == 1 else None)
            bottom += height
        axis.hlines(row["round_floor_ms"], x - 0.45, x + 0.45, color="black", linewidth=2)
        axis.text(x, bottom + 0.2, f"{row['round_ms']:.1f}\nefficiency {row['round_efficiency']:.2f}", ha="center", fontsize=8)
    axis.set_xticks(range(len(rows) + 1), ["plain step", *(f"budget {row['budget']}" for row in rows)])
    axis.set_ylabel("milliseconds")
    axis.set_ylim(0, 1.3 * max(row["round_ms"] for row in rows))
    axis.set_title(f"{result['shapes']}\n{result['card']}; every stage timed alone", fontsize=9)
    axis.legend(fontsize=8, loc="upper left", framealpha=1)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="what benchmarks.rounds wrote")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    rows = table(result)
    show(result, rows)
    if args.plot:
        plot(result, rows, args.plot)
    print(json.dumps({"card": result["card"], "shapes": result["shapes"], "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
