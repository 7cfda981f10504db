"""How probable the chosen tokens were: the target's own log-softmax, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """One chosen token and the most probable ones at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """`logits [n, V]` of the rows that chose `token_ids [n]`; `num_top` alternatives each. fp32 natural logarithms."""
    log_probs = logits.float().log_softmax(dim=-1)
    chosen = log_probs.gather(1, torch.as_tensor(token_ids, device=logits.device)[:, None]).squeeze(1).tolist()
    best = log_probs.topk(min(num_top, log_probs.shape[-1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprob(int(token_id), logprob, tuple(zip(*top, strict=True)))
        for token_id, logprob, top in zip(token_ids, chosen, tops, strict=True)
    ]
