"""Margins and noise over HTTP: a server's log-probabilities after a fresh prefill, and beside those of its decoding."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.client.answer import answer_of
from ddtree.client.http import TOP, Refused, ServerClient

BOUND_FP32 = 1e-4  # logits; fp32 paths that differ by more are not the same computation
BOUND_NARROW = 0.5  # logits; of a dtype narrower than fp32, whose logits' size is not known from outside
SAMPLE = 12  # decoded tokens whose log-probabilities are compared
PROMPT = "A lighthouse stands at the end of the pier. Every evening the keeper"


@dataclass(frozen=True)
class HttpNoise:
    """In logits, `measured` is None where the server gives no log-probabilities."""

    client: ServerClient
    model: str
    measured: float | None
    bound: float

    @classmethod
    def measure(cls, client: ServerClient, model: str, dtype: str | None) -> HttpNoise:
        """Decode a few tokens, then ask for the same places by prefills."""
        bound = BOUND_FP32 if dtype in (None, "float32") else BOUND_NARROW
        prompt = client.token_ids({"prompt": PROMPT})
        body = {"model": model, "prompt": prompt, "max_tokens": SAMPLE, "temperature": 0, "logprobs": TOP, "tree_budget": 0}
        try:
            decoded = answer_of(client.post("/v1/completions", body | {"return_token_ids": True})) if prompt else None
        except Refused:
            decoded = None
        if decoded is None or not decoded.top_logprobs or not decoded.token_ids:
            return cls(client, model, None, bound)
        largest = 0.0
        for place in range(1, len(decoded.top_logprobs), 4):
            fresh = client.next_logprobs([*prompt, *decoded.token_ids[:place]], model) or {}
            shared = fresh.keys() & decoded.top_logprobs[place].keys()
            largest = max([largest, *(abs(fresh[text] - decoded.top_logprobs[place][text]) for text in shared)])
        return cls(client, model, largest, bound)

    @property
    def limit(self) -> float:
        return min(2 * (self.measured or 0.0), self.bound)

    def margin(self, token_ids) -> float | None:
        """Between the target's two best tokens after `token_ids`; None where it cannot be had."""
        found = self.client.next_logprobs(token_ids, self.model)
        if found is None or len(found) < 2:
            return None
        best, second = sorted(found.values(), reverse=True)[:2]
        return best - second
