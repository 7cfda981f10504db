"""A whole run in this process: look, refuse or time, look again, and put the numbers beside what they depend on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddtree.bench.floor import measure_ceilings, round_floor_s
from ddtree.bench.machine import Neighbours, device_name, memory, versions
from ddtree.bench.offline import Offline
from ddtree.bench.output import PLAIN, Output
from ddtree.bench.pooled import quantiles, summarise
from ddtree.bench.predict import predict
from ddtree.bench.validity import Rules, Verdict, inspect
from ddtree.bench.workloads import Prompt

EOS_HONOURED = "honoured"
EOS_IGNORED = "ignored (--ignore-eos): every reply runs to max_tokens, past its natural end"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """What the run is of, as the user named it."""

    model: str
    drafter: str | None
    thinking: str
    command: str
    audit: Callable[[str, str], str]  # (configuration, item id) -> the command that would explain it


def run_offline(offline: Offline, prompts: Sequence[Prompt], facts: Facts, say: Say) -> dict:
    """The result of a run, or its refusal; JSON either way."""
    settings = offline.settings
    items, answers = offline.inspect(prompts, say)
    rules = Rules(settings.ignore_eos, facts.audit, offline.near_tie(items))
    verdict = inspect(answers, rules)
    result = describe(facts, settings, answers, verdict) | engine_facts(offline.engine)
    if verdict.refused:
        return verdict.as_json() | result
    kept = [item for item in items if item.id not in verdict.excluded]
    with Neighbours() as neighbours:
        timed = list(offline.measure(kept, say))
    result["other_cores"] = neighbours.cores
    verdict = inspect_passes(timed, rules, verdict)
    if verdict.refused:
        return verdict.as_json() | result
    rows = summarise(timed, settings.seed)
    result |= {"configs": rows, "near_ties": verdict.near_ties}
    if hasattr(offline.engine.target, "model"):
        result["memory"] = memory(offline.engine.target.device)
        result["ceilings"] = add_floors(offline, rows, timed)
        say("timing rounds for the predicted curve")
        result["predicted"] = predict(
            offline.engine, {name: row["acceptance_length"] for name, row in rows.items()}
        )
    return verdict.as_json() | result


def run_served(serving, prompts: Sequence[Prompt], facts: Facts, say: Say) -> dict:
    """As `run_offline`, on a server (`bench.serving.Serving`)."""
    settings = serving.settings
    items, answers = serving.inspect(prompts, say)
    rules = Rules(settings.ignore_eos, facts.audit, serving.near_tie(items))
    verdict = inspect(answers, rules)
    result = describe(facts, settings, answers, verdict)
    result["client_versions"] = result.pop("versions")
    known = serving.facts()
    result |= {name: known[name] for name in ("dtype", "device", "batch_invariant", "scoring")} | {"versions": {"server": known["version"]}}
    result |= {
        "url": serving.url,
        "concurrency": serving.concurrency,
        "rate": serving.rate,
        "block_size": None,
    }
    if verdict.refused:
        return verdict.as_json() | result
    timed = list(serving.measure([item for item in items if item.id not in verdict.excluded], say))
    verdict = inspect_passes(timed, rules, verdict)
    if verdict.refused:
        return verdict.as_json() | result
    rows = summarise(timed, settings.seed)
    for config, row in rows.items():
        row["throughput_tokens_per_s"] = quantiles(serving.throughput[config])
    return verdict.as_json() | result | {"configs": rows, "near_ties": verdict.near_ties}


def describe(facts: Facts, settings, answers, verdict: Verdict) -> dict:
    """Everything that a number of this run depends on; what no number may go without (contract.md)."""
    plain = [row[PLAIN] for row in answers.values()]
    modes = defaultdict(set)
    for row in answers.values():
        for output in row.values():
            modes[output.config].add(output.mode or "unknown")
    return {
        "model": facts.model,
        "drafter": facts.drafter,
        "thinking": facts.thinking,
        "temperature": settings.sampling.temperature,
        "seed": settings.seed,
        "eos_policy": EOS_IGNORED if settings.ignore_eos else EOS_HONOURED,
        "max_tokens": settings.max_tokens,
        "items": len(answers),
        "timed_items": len(answers) - len(verdict.excluded),
        "excluded": verdict.excluded,
        "forced_past_their_end": verdict.forced,
        "prompt_tokens": quantiles([output.prompt_tokens for output in plain]),
        "output_tokens": quantiles([output.output_tokens for output in plain]),
        "finish_reasons": dict(Counter(str(output.finish_reason) for output in plain)),
        "baseline": "budget 0 through the same path",
        "modes": {config: sorted(found) for config, found in modes.items()},
        "warm_up": "one untimed pass of every configuration over every prompt, which is also the inspection",
        "cache_state": "no prompt token came from a cache",
        "repeats": settings.repeats,
        "versions": versions(),
        "command": facts.command,
    }


def engine_facts(engine) -> dict:
    """Where and how the engine computes."""
    model, device = getattr(engine.target, "model", None), getattr(engine.target, "device", None)
    return {
        "dtype": str(model.dtype).removeprefix("torch.") if model is not None else None,
        "device": device_name(device) if device is not None else None,
        "batch_invariant": engine.config.batch_invariant,
        "block_size": engine.block_size,
        "scoring": engine.scoring,
        "concurrency": 1,
    }


def inspect_passes(timed: Sequence[Output], rules: Rules, before: Verdict) -> Verdict:
    """The timed outputs under the same rules: what was timed must be what was looked at."""
    passes = defaultdict(lambda: defaultdict(dict))
    seen = Counter()
    for output in timed:
        key = (output.item_id, output.config)
        passes[seen[key]][output.item_id][output.config] = output
        seen[key] += 1
    known = {(tie["prompt_id"], tie["config"], tie["position"]) for tie in before.near_ties}
    for answers in passes.values():
        found = inspect(answers, rules)
        before.reasons += [reason for reason in found.reasons if reason.kind not in ("short", "loop")]
        before.near_ties += [
            tie for tie in found.near_ties if (tie["prompt_id"], tie["config"], tie["position"]) not in known
        ]
        known |= {(tie["prompt_id"], tie["config"], tie["position"]) for tie in found.near_ties}
        if before.refused:
            break
    return before


def add_floors(offline: Offline, rows: dict, timed: Sequence[Output]) -> dict:
    """Put `floor_ms` beside each `round_ms`; returns the ceilings they rest on."""
    engine = offline.engine
    ceilings = measure_ceilings(engine.target.device, engine.target.model.dtype)
    contexts = [output.prompt_tokens + output.output_tokens / 2 for output in timed]
    context = sum(contexts) / len(contexts)
    for config, row in rows.items():
        floor_s = round_floor_s(
            engine, ceilings, row["nodes_per_round"] or 0, context, drafts=config != PLAIN
        )
        row["floor_ms"] = float(f"{1000 * floor_s:.4g}")
    return {
        "copy_gb_per_s": round(ceilings.bytes_per_s / 1e9, 2),
        "matmul_tflops": round(ceilings.flops_per_s / 1e12, 4),
    }
