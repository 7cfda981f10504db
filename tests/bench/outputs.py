"""Outputs as an honest engine would give them, to be spoiled one field at a time."""

from __future__ import annotations

from dataclasses import replace

from ddtree.bench.output import Output


def plain(item_id="p", token_ids=tuple(range(40)), **changes) -> Output:
    count = len(token_ids)
    output = Output(
        item_id=item_id,
        config="0",
        token_ids=tuple(token_ids),
        text=" ".join(map(str, token_ids)),
        prompt_tokens=10,
        output_tokens=count,
        finish_reason="length",
        mode="target_only",
        tree_budget=0,
        decode_rounds=count - 1,
        histogram={1: count - 1},
        ttft_s=0.5,
        e2e_s=0.5 + 0.1 * (count - 1),
        itl_s=(0.1,) * (count - 1),
        stage_s={"verify": 0.09 * (count - 1)},
    )
    return replace(output, **changes)


def drafted(budget="8", item_id="p", token_ids=tuple(range(40)), **changes) -> Output:
    """Three tokens a round, twice as fast as plain."""
    count = len(token_ids) - 1
    rounds, trimmed = -(-count // 3), -count % 3
    base = plain(
        item_id, token_ids, config=budget, mode="ddtree", tree_budget=int(budget) if budget.isdigit() else 7
    )
    spent = {
        "decode_rounds": rounds,
        "histogram": {3: rounds},
        "trimmed_tokens": trimmed,
        "nodes_verified": 8 * rounds,
    }
    return replace(base, **{**spent, "e2e_s": 0.5 + 0.05 * count, "itl_s": (0.15,) * rounds, **changes})
