"""Does the served drafter compute what the trained one does? Taps against transformers, acceptance against the card.

A lossless server hides a broken drafter: the output stays right, only the acceptance length falls to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ddtree.audit.compare import row_errors, tolerance
from ddtree.audit.findings import DRAFTER, Fault, Result
from ddtree.audit.observe import run_alone

ALARM = 1.15  # mean acceptance length at which a drafter is as good as none
SHORTFALL = 0.75  # of the card's gain over 1, below which the difference is no matter of prompts
FEW_ROUNDS = 20


def tap_faults(model, layer_ids: Sequence[int], reference, token_ids: Sequence[int]) -> list[Fault]:
    """The layers that the drafter reads, against hidden_states[L + 1] of transformers."""
    theirs, ours = reference.hidden_states(token_ids), run_alone(model, token_ids)[0]
    limit, num_layers = 4 * tolerance(ours.hidden.dtype), len(theirs) - 1
    faults = []
    for layer in layer_ids:
        error = float(row_errors(ours.layer_output(layer, num_layers), theirs[layer + 1]).max())
        if error > limit:
            where = f"tap of layer {layer}: not hidden_states[{layer + 1}] of transformers"
            faults.append(Fault(DRAFTER, f"{where} ({error:.2g})", measured=error))
    return faults


def by_depth(histogram: Mapping[int, int]) -> list[float]:
    """Share of rounds whose path reaches depth 1, 2, …"""
    rounds = sum(histogram.values())
    deepest = max(histogram, default=1) - 1
    return [
        round(sum(count for length, count in histogram.items() if length > depth) / rounds, 3)
        for depth in range(1, deepest + 1)
    ]


def acceptance_faults(histograms: Mapping[int, Mapping[int, int]], card: Mapping[str, float] | None, result: Result) -> None:
    """The alarm near 1, and the card's figure at the budgets that both have. Books faults and notes."""
    # "auto" may decode plainly where that is faster, so its acceptance says nothing about the drafter.
    for budget, histogram in sorted((budget, each) for budget, each in histograms.items() if budget != "auto"):
        rounds = sum(histogram.values())
        if not budget or not rounds:
            continue
        mean = sum(length * count for length, count in histogram.items()) / rounds
        result.notes.append(f"acceptance at budget {budget}: {mean:.2f} over {rounds} rounds, by depth {by_depth(histogram)[:8]}")
        if rounds < FEW_ROUNDS:
            result.notes.append(f"budget {budget}: {rounds} rounds are too few to judge the drafter by")
        elif mean < ALARM:
            where = f"drafter: acceptance length {mean:.2f} at budget {budget}; it drafts hardly anything that is accepted"
            result.add(Fault(DRAFTER, where, budget=budget, measured=mean))
        elif card and str(budget) in card and mean - 1 < SHORTFALL * (card[str(budget)] - 1):
            result.notes.append(
                f"budget {budget}: acceptance length {mean:.2f}, the drafter's card says {card[str(budget)]:.2f}; prompts "
                "differ, but look at the drafter checks above"
            )


@torch.inference_mode()
def check_fidelity(audit, reference, card, prompts) -> None:
    """All of it, into the audit's result. The drafter's own computation is the inspector's part."""
    target, result = audit.engine.target, audit.result
    if audit.engine.drafter is None:
        result.notes.append("fidelity: there is no drafter")
        return
    if reference is None:
        result.notes.append("fidelity: no transformers reference, so the taps were compared with a fresh forward only")
    else:
        for fault in tap_faults(target.model, target.feature_layers, reference, prompts[0].token_ids):
            result.add(fault)
    # The card is of greedy decoding; sampled runs would blur the comparison.
    at_zero = (card or {}).get("0") if audit.plan.temperatures == (0.0,) else None
    acceptance_faults(audit.lengths, at_zero, result)
    if card is None:
        result.notes.append("fidelity: the drafter has no acceptance.json, so its acceptance has nothing to be compared with")
