"""A decode round as JSON: the tree with its tokens and the drafter's probabilities, the accepted path, the stage times."""

from __future__ import annotations

from ddtree.engine.request import Emission
from ddtree.server.logprobs import shown_token
from ddtree.text import Tokenizer


class TraceShaper:
    """Shapes the rounds of a request that wants them."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def shape(self, index: int, emission: Emission) -> dict:
        """`ddtree_trace` of one emission that has a trace; `index` is its choice."""
        trace = emission.trace
        tree, bonus = trace.tree, trace.acceptance.bonus_token
        token_ids = tree.token_ids.tolist()
        return {
            "round": trace.number,
            "index": index,
            "context_length": trace.context_length,
            "scoring": trace.scoring,
            "token_ids": token_ids,
            "tokens": [self._shown(token_id) for token_id in token_ids],
            "parents": tree.parents.tolist(),
            "depths": tree.depths.tolist(),
            "probabilities": tree.probabilities().round(6).tolist(),
            "path": trace.acceptance.path.tolist(),
            "bonus_token": {"token_id": bonus, "token": self._shown(bonus)},
            "emitted": list(emission.token_ids),
            "stage_ms": {stage: _ms(seconds) for stage, seconds in trace.stage_s.items()},
            "round_ms": _ms(trace.round_s),
        }

    def _shown(self, token_id: int) -> str:
        return shown_token(self._tokenizer.token_bytes(token_id))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
