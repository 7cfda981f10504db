"""One JSON line per inspected round: what was drafted, chosen, kept and committed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator


def trace_lines(inspections, text_of: Callable[[int], str]) -> Iterator[str]:
    """Of every round of every inspection, in order."""
    for prompt_id, inspection in inspections:
        for number, record in enumerate((each for each in inspection.records if each.tree is not None), start=1):
            tree = record.tree
            yield json.dumps(
                {
                    "prompt_id": prompt_id,
                    "round": number,
                    "context_length": len(record.tokens_before) - 1,
                    "token_ids": tree.token_ids.tolist(),
                    "parents": tree.parents.tolist(),
                    "positions": record.forward.rows.positions.tolist(),
                    "target_tokens": record.target_tokens.tolist(),
                    "path": record.path.tolist(),
                    "emitted": record.emitted,
                    "text": "".join(text_of(token_id) for token_id in record.emitted),
                }
            )
