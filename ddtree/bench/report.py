"""A run for people: a table, or a refusal with its evidence. The last line is JSON for machines."""

from __future__ import annotations

import json

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

SHOWN_TEXT = 400  # characters of a raw text in a refusal
QUIET_CORES = 0.2  # what a machine's own services may take without a word


def show(result: dict, console: Console) -> None:
    """Table or refusal, then the JSON line."""
    if result["refused"]:
        show_refusal(result, console)
    else:
        show_table(result, console)
    # print, not console.print: rich would wrap the line.
    console.file.write(json.dumps(result, allow_nan=False) + "\n")
    console.file.flush()


def show_refusal(result: dict, console: Console) -> None:
    """Why there is no speed, what was generated, and what to run next."""
    console.print("[bold red]refused:[/bold red] these outputs are not worth a clock; no speed is reported")
    for reason in result["reasons"]:
        console.print(f"\n[bold]{reason['kind']}[/bold]: {escape(reason['message'])}")
        console.print(
            f"  configurations {', '.join(reason['configs'])}; prompts {_some(reason['prompt_ids'])}"
        )
        console.print(Panel(_raw(reason["text"]), title=reason["example"], title_align="left"))
        if not reason["example"].endswith("budget 0"):
            console.print(Panel(_raw(reason["plain_text"]), title="plain decoding", title_align="left"))
        console.print(f"  what to try: {escape(reason['remedy'] or '-')}")
        console.print(
            f"  what would explain it: [bold]{escape(reason['audit'] or '-')}[/bold]", soft_wrap=True
        )
    console.print()


def show_table(result: dict, console: Console) -> None:
    """One row per configuration, and under it what the numbers depend on."""
    served = "throughput_tokens_per_s" in next(iter(result["configs"].values()))
    table = Table(
        title=run_title(result),
        title_justify="left",
        caption="; ".join(describe_run(result)),
        caption_justify="left",
    )
    heads = ["budget", "tokens/s", "speedup", "95 %", "accept", "TTFT ms", "TPOT ms", "ITL ms"]
    for head in [
        *heads,
        *(["all, tokens/s", "e2e ms"] if served else ["round ms", "floor ms", "draft+verify ms"]),
    ]:
        table.add_column(head, justify="right", no_wrap=True)
    for config, row in result["configs"].items():
        speed, speedup = row["tokens_per_s"], row["speedup"]
        cells = [
            "0 (plain)" if config == "0" else config,
            f"{speed['pooled']:.1f}",
            f"{speedup['pooled']:.2f}x",
            "" if config == "0" else "{:.2f} - {:.2f}".format(*speedup["interval"]),
            _number(row["acceptance_length"], 2),
            *(_median(row[name]) for name in ("ttft_ms", "tpot_ms", "itl_ms")),
        ]
        if served:
            cells += [_median(row["throughput_tokens_per_s"]), _median(row["e2e_ms"])]
        else:
            stages = row["stage_ms"]
            shown = f"{stages['draft']:.1f}+{stages['verify']:.1f}" if stages else "-"
            cells += [_number(row["round_ms"], 2), _number(row.get("floor_ms"), 2), shown]
        table.add_row(*cells)
    console.print(table)
    for note in notes(result):
        console.print(f"- {note}", markup=False)


def notes(result: dict) -> list[str]:
    """What a reader must know before quoting a number."""
    found = []
    if result["eos_policy"] != "honoured":
        found.append(f"EOS {result['eos_policy']}")
    if result["forced_past_their_end"]:
        found.append(
            f"short or looping under --ignore-eos, timed all the same: {_kinds(result['forced_past_their_end'])}"
        )
    if result["excluded"]:
        found.append(f"not timed: {_kinds(result['excluded'])}")
    if result["near_ties"]:
        worst = max(tie["margin"] for tie in result["near_ties"])
        found.append(f"{len(result['near_ties'])} near ties with plain decoding, margins up to {worst:g}")
    if (result.get("other_cores") or 0) > QUIET_CORES:
        found.append(
            f"other processes kept {result['other_cores']:.1f} cores busy while this was timed: "
            "it is the speed of a busy machine; measure again on a quiet one"
        )
    if result["repeats"] < 3:
        found.append(f"only {result['repeats']} timed passes: the spread is a guess")
    return found


def run_title(result: dict) -> str:
    """What ran where."""
    drafter = f"drafter {result['drafter']}" if result["drafter"] else "no drafter"
    return f"{result['model']}, {drafter}, {result['dtype'] or 'dtype unknown'}, {result['device'] or 'device unknown'}"


def describe_run(result: dict) -> list[str]:
    """What was measured, in a few phrases."""
    prompt, output = result["prompt_tokens"], result["output_tokens"]
    return [
        f"{result['timed_items']} prompts x {result['repeats']} passes in turn",
        f"prompt {prompt['median']:g} and output {output['median']:g} tokens (medians)",
        f"max_tokens {result['max_tokens']}",
        f"temperature {result['temperature']:g}",
        *([f"drafts {result['scoring']}"] if result.get("scoring") else []),
        *(["batch-invariant"] if result.get("batch_invariant") else []),
        f"thinking {result['thinking']}",
        f"EOS {result['eos_policy'].split(' ')[0]}",
        f"concurrency {result['concurrency'] or 'unlimited'}",
        *([f"{result['rate']:g} requests/s, Poisson arrivals"] if result.get("rate") else []),
        "speeds are pooled, tokens after the first over their time; accept = tokens per round, bonus included",
    ]


def _kinds(marked: dict[str, str]) -> str:
    return ", ".join(f"{item_id} ({kind})" for item_id, kind in marked.items())


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _raw(text: str) -> str:
    """The text as it is, cut if long."""
    cut = text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]} ... ({len(text)} characters)"
    return escape(repr(cut))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _median(spread: dict | None) -> str:
    return "-" if spread is None else f"{spread['median']:.1f}"
