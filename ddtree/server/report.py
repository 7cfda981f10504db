"""The `ddtree` object and `usage`: what an answer cost and gained. Never NaN; null for 0/0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddtree.engine.request import AUTO, RequestStats, scoring_of

TreeBudget = int | str | None


def ddtree_object(stats: Sequence[RequestStats], requested: TreeBudget, seed: int) -> dict:
    """One object for one or several choices: counts and stage times add up, ttft is the first token of all.

    Of several choices, output_tokens = num_choices + sum(length * count) - trimmed_tokens.
    """
    histogram = sum((each.acceptance_histogram for each in stats), Counter())
    rounds, plain_rounds, conditioned_rounds = (_total(stats, f"{kind}_rounds") for kind in ("decode", "plain", "conditioned"))
    output_tokens = _total(stats, "output_tokens")
    decode_s = _total(stats, "decode_s")
    after_first = sum(max(each.output_tokens - 1, 0) for each in stats)
    ttfts = [each.ttft_s for each in stats if each.ttft_s is not None]
    lead = max(stats, key=lambda each: (each.tree_budget == AUTO, each.nodes_verified), default=RequestStats())
    return {
        "mode": lead.mode,
        "reason": next((each.reason for each in stats if each.reason), None),
        "block_size": lead.block_size,
        "scoring": scoring_of(conditioned_rounds, rounds - plain_rounds),
        "tree_budget": lead.tree_budget,
        "tree_budget_requested": requested,
        "auto": auto_object(stats),
        "decode_rounds": rounds,
        "plain_rounds": plain_rounds,
        "conditioned_rounds": conditioned_rounds,
        "nodes_verified": _total(stats, "nodes_verified"),
        "accepted_tokens": _total(stats, "accepted_tokens"),
        "trimmed_tokens": _total(stats, "trimmed_tokens"),
        "mean_acceptance_length": _ratio(sum(n * count for n, count in histogram.items()), rounds),
        "acceptance_histogram": {str(length): histogram[length] for length in sorted(histogram)},
        "output_tokens": output_tokens,
        "prefill_ms": _ms(_total(stats, "prefill_s")),
        "draft_ms": _ms(_total(stats, "draft_s")),
        "verify_ms": _ms(_total(stats, "verify_s")),
        "ttft_ms": _ms(min(ttfts)) if ttfts else None,
        "tokens_per_second": _ratio(after_first, decode_s) if after_first else None,
        "cached_tokens": _total(stats, "cached_tokens"),
        "preemptions": _total(stats, "preemptions"),
        "seed": seed,
    }


def auto_object(stats: Sequence[RequestStats]) -> dict | None:
    """How the auto budget decided and by what: the cost model's times, the tokens that it expected. None with a pinned one.

    `trust_offset`: what this request's own text taught, added to the log-odds of every draft (mean over the choices).
    """
    chosen = [each for each in stats if each.tree_budget == AUTO]
    if not chosen:
        return None
    rounds, tokens, seconds, plain_s = (
        _total(chosen, name) for name in ("decode_rounds", "predicted_tokens", "predicted_s", "predicted_plain_s")
    )
    return {
        "predicted_speedup": _ratio(plain_s, seconds),
        "predicted_acceptance_length": _ratio(tokens, rounds),
        "mean_nodes": _ratio(_total(chosen, "nodes_verified"), rounds),
        "round_ms": _ms(seconds / rounds) if rounds else None,
        "plain_round_ms": _ms(plain_s / tokens) if tokens else None,
        "probe_rounds": _total(chosen, "probe_rounds"),
        "trust_offset": round(_total(chosen, "trust_offset") / len(chosen), 4),
    }


def usage_object(num_prompt: int, num_completion: int, num_cached: int, num_reasoning: int | None) -> dict:
    """OpenAI's usage; `num_reasoning` is None where no thought can be."""
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    if num_reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return usage


def _total(stats: Sequence[RequestStats], name: str) -> int | float:
    return sum(getattr(each, name) for each in stats)


def _ratio(value: float, by: float) -> float | None:
    return round(value / by, 4) if by > 0 else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
