"""An adapter computed a second time, a path at a time, and how far rounding may take the served one from it.

The twin computes in fp64, from the same tensors, drafter's states and log-probabilities. So nothing but the rounding of the
served dtype parts the two, and how much that is follows from the numbers themselves. With u the dtype's unit roundoff (2^-8 in
bf16, 2^-24 in fp32) and u' = 2^-24 that of sums, which are added up in fp32, a stored value v is off by u |v|, and a sum of K
products

    y = sum of w_k x_k    by s_y,    s_y^2 = sum of w_k^2 (s_k^2 + K u'^2 x_k^2)  +  u^2 y^2

where s_k is the error of x_k: errors of different terms go their own ways, so their squares add up. Stage by stage:

- hidden rows have been rounded many times, by a summary of the path too: s is measured, the root mean square over a row's H
  values of the same formula in the served dtype against fp64;
- query q, own weight w and elsewhere z are one such product over H, of parent and grandparent one each, added up;
- a candidate's match is one over E, of q and P head(c), the latter rounded as well; or, few queries on a CPU, one over C, of
  head(c) and a rounded P^T q: both are allowed;
- its score, own + match + w own, passes on the errors of match and w; so does that of everything else, the error of z, beside that of
  log(1 - sum of e^own) in fp32, which is u' sqrt(M) over the difference;
- log-softmax passes on a candidate's error and the mean one of all, by their probabilities.

SPREADS times that is the limit: with the shipped adapter in bf16 0.3 nats at the median and 0.6 at most, in fp32 1e-4. The most seen of sound adapters
of any kind and two shapes, 49,000 scores in bf16, was 2.4 spreads; SmolLM2's own in real text 1.1. What is wrong with an adapter moves some
score of a round by more: of the terms left out or shifted by one, the least was 6.6 spreads, the bias of `mix` (docs/log.md, 2026-11-30).

Letters: K block slots, D = K - 1 depths, M candidates per depth, C model width, H adapter width, E rank, n path nodes.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ddtree.models.adapter import LEAST_LOG_PROB, PAIRWISE, Adapter
from ddtree.models.conditioning import LEAST_REST

SPREADS = 5.0
SUMS = torch.finfo(torch.float32).eps / 2  # unit roundoff of what is added up


class AdapterTwin:
    """The adapter's formula for one path, from its tensors."""

    def __init__(self, adapter: Adapter, model: Any) -> None:
        self.adapter, self.exact = adapter, copy.deepcopy(adapter).double()
        self.roundoff = torch.finfo(adapter.depth.dtype).eps / 2
        self.embedding, self.head = model.embed_tokens, model.lm_head.weight

    @torch.inference_mode()
    def rows(self, slots: torch.Tensor, tokens: list[int], token_ids: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[n, M] log-probabilities below each of `tokens`, at most D, and how many nats served ones may be away.

        `slots` [K, C] of the block, `token_ids` and the drafter's `own` [D, M].
        """
        tokens = tokens[: len(token_ids)]
        embedded = F.embedding(torch.tensor(tokens, device=slots.device), self.embedding).to(slots.dtype)
        out, variance = self._out(slots, embedded)
        candidates, own = (torch.from_numpy(each[: len(tokens)]).to(slots.device) for each in (token_ids, own.astype(np.float64)))
        matches, matches_variance = self._matches(out[:, :-2], variance[:, :-2], candidates)
        clamped = own.clamp(min=LEAST_LOG_PROB)
        left = (1 - own.exp().sum(dim=1, keepdim=True)).clamp(min=LEAST_REST)
        scores = torch.cat([own + matches + out[:, -2:-1] * clamped, left.log() + out[:, -1:]], dim=1)
        rest_variance = variance[:, -1:] + (SUMS / left).square() * candidates.shape[1]
        spread = torch.cat([matches_variance + variance[:, -2:-1] * clamped.square(), rest_variance], dim=1).sqrt()
        found = scores.log_softmax(dim=1)
        limits = SPREADS * (spread + (found.exp() * spread).sum(dim=1, keepdim=True))
        return found[:, :-1].cpu().numpy(), limits[:, :-1].cpu().numpy()

    def _out(self, slots: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, E + 2] of each parent: query, weight of the drafter's own, elsewhere; and each value's variance."""
        served, exact = hidden_rows(self.adapter, slots, embedded), hidden_rows(self.exact, slots.double(), embedded.double())
        out = torch.zeros(len(embedded), self.adapter.config.rank + 2, dtype=torch.float64, device=slots.device)
        variance = torch.zeros_like(out)
        for name, hidden in exact.items():
            layer, first = getattr(self.exact, f"{name}out"), len(out) - len(hidden)
            part = layer(hidden)
            error = (served[name].double() - hidden).square().mean(dim=1, keepdim=True)
            out[first:] += part
            variance[first:] += passed_on(hidden, error) @ layer.weight.square().T + (self.roundoff * part).square()
        if len(exact) > 1:
            variance += (self.roundoff * out).square()
        return out, variance

    def _matches(self, query: torch.Tensor, variance: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`query` [n, E] with its variance and candidates [n, M] -> [n, M] and its variance."""
        weight = self.exact.candidate_token.weight
        head = F.embedding(token_ids, self.head).double()
        candidates = head @ weight.T
        matches = torch.einsum("ne,nme->nm", query, candidates)
        rounded = self.roundoff**2 * query.square()
        detour = torch.einsum("nc,nmc->nm", (query @ weight).square(), head.square())
        found = torch.einsum("ne,nme->nm", passed_on(query, variance) + rounded, candidates.square())
        return matches, found + self.roundoff**2 * (detour + matches.square())


def passed_on(x: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """What each of the K terms `x` [.., K] of a sum of products adds to its variance, per unit of its weight's square."""
    return variance + x.shape[-1] * SUMS**2 * x.square()


def hidden_rows(adapter: Adapter, slots: torch.Tensor, embedded: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `out` is computed from, in the dtype of the three: [n, H] of the parents and, where they are looked at, [n - 1, H] of
    the grandparents, by the prefix of the tensors' names; `slots` [K, C], `embedded` [n, C] of the path's tokens."""
    weights, count = dict(adapter.state_dict()), len(embedded)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def mixed(prefix: str, inputs: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(inputs)
        return hidden + F.silu(linear(f"{prefix}mix", hidden))

    place = linear("child_slot", slots[1:]) + linear("parent_slot", slots[:-1]) + weights["depth"][: len(slots) - 1]
    inputs = place[:count] + linear("root_token", embedded[:1]) + linear("parent_token", embedded)
    if adapter.config.summary not in PAIRWISE:
        inputs = inputs + adapter.summarise(inputs[None])[0]
    found = {"": mixed("", inputs)}
    if adapter.config.summary == "grandparent" and count > 1:
        grandparents = linear("grandparent_slot", slots[2 : count + 1]) + weights["grandparent_depth"][1:count]
        found["grandparent_"] = mixed("grandparent_", grandparents + linear("grandparent_token", embedded[:-1]))
    return found
