"""Is there anything to time? Looks at every configuration's output before a clock starts.

A benchmark that times four-token replies, loops, wrong tokens or plain decoding under another name is refused, with the
reason, the raw text beside the plain text, and the command that would explain it (contract.md, Benchmarks and audits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ddtree.bench.output import AUTO, CHAIN, PLAIN, Output, scoring_of

SHORTEST = 16  # tokens
LOOP_WINDOW = 48  # tokens at the end that are looked at
LOOP_PERIODS = 2  # in the window
MOST_EXCLUDED = 0.2  # share of the prompts that may be short or loop


@dataclass(frozen=True)
class Reason:
    """Why a run is refused, with one example."""

    kind: str  # short | loop | differs | fell_back | cached | counts
    message: str
    configs: list[str]
    prompt_ids: list[str]
    text: str = ""
    plain_text: str = ""
    example: str = ""  # which prompt and configuration the two texts are of
    audit: str | None = None  # the command that would explain it
    remedy: str | None = None


@dataclass
class Verdict:
    """What the inspection found. Speeds may be shown only where `refused` is False."""

    reasons: list[Reason] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)  # item id -> why it is not timed
    near_ties: list[dict] = field(default_factory=list)
    forced: dict[str, str] = field(default_factory=dict)  # under ignore_eos: what would have been excluded

    @property
    def refused(self) -> bool:
        return bool(self.reasons)

    def as_json(self) -> dict:
        return {"refused": self.refused, "reasons": [asdict(reason) for reason in self.reasons]}


@dataclass(frozen=True)
class Rules:
    """What the run asked for, as far as it bears on what its outputs may be."""

    ignore_eos: bool = False
    audit: Callable[[str, str], str] = lambda config, item_id: f"ddtree audit --budgets 0,{config}"
    near_tie: Callable[[Output, Output, int], dict | None] = lambda plain, other, position: None


def inspect(answers: Mapping[str, Mapping[str, Output]], rules: Rules) -> Verdict:
    """Judge `answers[item id][configuration]`; every item has a plain answer."""
    verdict = Verdict()
    _judge_length(answers, rules, verdict)
    _judge_equality(answers, rules, verdict)
    outputs = [output for row in answers.values() for output in row.values()]
    _refuse_where(outputs, answers, rules, verdict, "fell_back", fallback_of)
    _refuse_where(outputs, answers, rules, verdict, "cached", cached_of)
    _refuse_where(outputs, answers, rules, verdict, "counts", miscount_of)
    return verdict


def is_loop(token_ids: Sequence[int]) -> bool:
    """Do the last 48 tokens repeat: a period twice over within them, or all of them as they stood before?"""
    tail = list(token_ids[-LOOP_WINDOW:])
    if len(tail) < SHORTEST:
        return False
    if any(tail[period:] == tail[:-period] for period in range(1, len(tail) // LOOP_PERIODS + 1)):
        return True
    starts = range(len(token_ids) - 2 * LOOP_WINDOW + 1) if len(tail) == LOOP_WINDOW else ()
    return any(list(token_ids[start : start + LOOP_WINDOW]) == tail for start in starts)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two outputs differ, the end of the shorter one included; None if they are the same."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def fallback_of(output: Output) -> str | None:
    """What else than the configuration's own decoding took place."""
    if output.is_plain:
        return None if output.mode in (None, "target_only") else f"budget 0 ran in mode {output.mode}"
    if output.mode is None:
        return "the server does not say how it decoded (no `ddtree` object): it may have ignored tree_budget"
    if output.config.startswith(AUTO) and output.tree_budget == AUTO and output.reason is None:
        return None  # whatever it chose is what was asked for
    if output.mode not in ("ddtree", "chain"):
        return f"mode {output.mode}: {output.reason or 'no reason given'}"
    if output.reason:
        return output.reason
    name, _ = scoring_of(output.config)
    if name == CHAIN and output.mode != "chain":
        return f"mode {output.mode} where a chain was asked for"
    if name.isdigit() and output.tree_budget != int(name):
        return f"tree budget {output.tree_budget} was in force"
    # The last round of a request has nothing left to draft for.
    if output.decode_rounds > 1 and not output.nodes_verified:
        return f"no node was drafted in {output.decode_rounds} rounds"
    return None


def cached_of(output: Output) -> str | None:
    """A warm prefix makes the first token cheap for whoever comes second."""
    return f"{output.cached_tokens} prompt tokens came from the cache" if output.cached_tokens else None


def miscount_of(output: Output) -> str | None:
    """Counts that do not agree with the tokens or with each other."""
    if output.token_ids and output.output_tokens != len(output.token_ids):
        return f"output_tokens is {output.output_tokens}, there are {len(output.token_ids)} token ids"
    if output.mode is None or not output.output_tokens:
        return None
    emitted = sum(length * count for length, count in output.histogram.items())
    if output.output_tokens != 1 + emitted - output.trimmed_tokens:
        return f"{output.output_tokens} output tokens, but 1 + {emitted} accepted or bonus - {output.trimmed_tokens} trimmed"
    rounds = sum(output.histogram.values())
    return (
        None
        if rounds == output.decode_rounds
        else f"{output.decode_rounds} rounds, {rounds} in the histogram"
    )


def _judge_length(answers, rules: Rules, verdict: Verdict) -> None:
    """Short outputs and loops: few are excluded, many refuse the run."""
    found = {"short": {}, "loop": {}}
    for item_id, row in answers.items():
        for output in row.values():
            kind = (
                "short" if output.output_tokens < SHORTEST else "loop" if is_loop(output.token_ids) else None
            )
            if kind:
                found[kind].setdefault(item_id, []).append(output)
    marked = {**found["loop"], **found["short"]}
    kinds = {item_id: "short" if item_id in found["short"] else "loop" for item_id in marked}
    if rules.ignore_eos:
        verdict.forced = kinds
        return
    if len(marked) <= MOST_EXCLUDED * len(answers):
        verdict.excluded = kinds
        return
    what = {
        "short": f"end after fewer than {SHORTEST} tokens: a speed of so few tokens means nothing",
        "loop": f"end in a loop (the last {LOOP_WINDOW} tokens repeat): drafting a loop is easier than drafting text",
    }
    for kind, outputs in found.items():
        if outputs:
            share = f"{len(outputs)} of {len(answers)} prompts"
            remedy = (
                "ask for longer answers, raise --max-tokens, or force the length with --ignore-eos (labelled)"
            )
            faulty = [output for row in outputs.values() for output in row]
            _refuse(verdict, answers, rules, kind, f"{share} {what[kind]}", faulty, remedy)


def _judge_equality(answers, rules: Rules, verdict: Verdict) -> None:
    """Every output must be plain decoding's, token by token; near ties are listed."""
    differing, positions = [], {}
    for item_id, row in answers.items():
        plain = row[PLAIN]
        for output in row.values():
            position = _difference(plain, output)
            if position is None:
                continue
            tie = rules.near_tie(plain, output, position)
            if tie is not None:
                verdict.near_ties.append(
                    {"prompt_id": item_id, "config": output.config, "position": position, **tie}
                )
            else:
                differing.append(output)
                positions.setdefault((item_id, output.config), position)
    if differing:
        first = differing[0]
        where = f"first at token {positions[first.item_id, first.config]} of {first.item_id}, {_name(first)}"
        message = (
            f"{len(differing)} outputs differ from plain decoding, {where}: speculation here is not lossless"
        )
        _refuse(verdict, answers, rules, "differs", message, differing, "find the layer with the audit")


def _difference(plain: Output, output: Output) -> int | None:
    if plain.token_ids and output.token_ids:
        return first_difference(plain.token_ids, output.token_ids)
    return first_difference(plain.text, output.text)


def _refuse_where(outputs, answers, rules: Rules, verdict: Verdict, kind: str, fault_of) -> None:
    """One reason for all outputs in which `fault_of` finds something."""
    faulty = [output for output in outputs if fault_of(output)]
    if not faulty:
        return
    what = {
        "fell_back": "were not decoded as asked",
        "cached": "hit a cache",
        "counts": "are counted wrongly",
    }[kind]
    remedy = {
        "fell_back": "give a drafter that fits (--drafter), or a budget and a length within its limits",
        "cached": "turn prefix caching off, or restart the server",
        "counts": "report it: the numbers of this server cannot be trusted",
    }[kind]
    message = (
        f"{len(faulty)} of {len(outputs)} outputs {what}, first {_name(faulty[0])}: {fault_of(faulty[0])}"
    )
    _refuse(verdict, answers, rules, kind, message, faulty, remedy)


def _refuse(
    verdict: Verdict, answers, rules: Rules, kind: str, message: str, outputs: Sequence[Output], remedy: str
):
    example = next((output for output in outputs if not output.is_plain), outputs[0])
    configs = sorted(
        {output.config for output in outputs}, key=lambda name: (not name.isdigit(), name.zfill(8))
    )
    verdict.reasons.append(
        Reason(
            kind=kind,
            message=message,
            configs=configs,
            prompt_ids=list(dict.fromkeys(output.item_id for output in outputs)),
            text=example.text,
            plain_text=answers[example.item_id][PLAIN].text,
            example=f"{example.item_id}, {_name(example)}",
            audit=rules.audit(example.config, example.item_id),
            remedy=remedy,
        )
    )


def _name(output: Output) -> str:
    return f"budget {output.config}" if output.config.isdigit() else output.config
