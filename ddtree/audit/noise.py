"""The measured noise between two paths to the same logits, and the target's margin at a position.

A near tie is a divergence that rounding explains: one-row steps, tree rows and a prefill multiply in other orders.
How much that moves a logit is measured on the model itself, and bounded by what its dtype can do, so that a fault
does not raise the bar for itself.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree.audit.compare import NEAR_TIE_FP32
from ddtree.caches.rows import Rows, Span
from ddtree.engine.request import Request
from ddtree.engine.sequence import Sequence
from ddtree.sampling.choose import choose, margins

SAMPLE = 24  # tokens of the prefix that are scored on every path
FORK = 3  # copies of a node in the tree that scores as a tree does


@dataclass(frozen=True)
class Noise:
    """In logits. `limit` is what a margin may be for a divergence to be a near tie."""

    measured: float  # the largest difference of a logit between the paths
    bound: float  # what the dtype can do at most
    samples: int

    @property
    def limit(self) -> float:
        # Two logits may move apart by the noise each.
        return min(2 * self.measured, self.bound)

    @property
    def excessive(self) -> bool:
        return self.measured > self.bound


@torch.inference_mode()
def measure_noise(model, token_ids) -> Noise:
    """Score the last tokens of `token_ids` by one prefill, by one-row steps, and as rows of a tree."""
    token_ids = list(token_ids)
    count = min(SAMPLE, len(token_ids) - 1)
    if count < 1:
        raise ValueError(f"noise is measured over at least 2 tokens, got {len(token_ids)}")
    whole = _prefill(model, token_ids)[0][-count:]
    largest = 0.0
    for path in (_stepped, _as_tree):
        largest = max(largest, float((path(model, token_ids, count) - whole).abs().max()))
    return Noise(largest, bound_of(whole), count * whole.shape[-1])


def bound_of(logits: torch.Tensor) -> float:
    """What rounding may do to a gap: 1e-4 in fp32; else four units of the dtype at the logits' size."""
    if logits.dtype == torch.float32:
        return NEAR_TIE_FP32
    return 4 * torch.finfo(logits.dtype).eps * float(logits.float().abs().max())


@torch.inference_mode()
def rescored(model, request: Request, prefix) -> tuple[int, float]:
    """The target's own token after `prefix` and its margin in logits, by a fresh forward from scratch."""
    prefix = list(prefix)
    logits = _prefill(model, prefix)[0][-1:]
    sequence = Sequence(0, request)
    sequence.open_noise(model.config.vocab_size, logits.device)
    noise = sequence.noise(len(prefix), 1) if sequence.noise else None
    margin = float(margins(logits, request.sampling, noise)[0])
    # Sampled margins are in logits over the temperature.
    scale = 1.0 if request.sampling.greedy else request.sampling.temperature
    return int(choose(logits, request.sampling, noise)[0]), margin * scale


def _rows(model, cache, token_ids, depths=None, mask=None, parents=None) -> Rows:
    device = next(model.parameters()).device
    count, start = len(token_ids), cache.context_length
    depths = torch.arange(count) if depths is None else depths
    if mask is not None:
        mask, parents = mask.to(device), parents.to(device)
    return Rows(
        torch.tensor(list(token_ids), dtype=torch.long, device=device),
        (start + depths).to(device),
        (Span(cache, 0, count, mask, parents),),
    )


def _prefill(model, token_ids):
    """Logits [R, V] of consecutive tokens, and the cache that holds them."""
    cache = model.new_cache()
    logits = model.logits(model(_rows(model, cache, token_ids)).hidden)
    cache.commit(torch.arange(len(token_ids), device=logits.device))
    return logits, cache


def _stepped(model, token_ids, count: int) -> torch.Tensor:
    cache, logits = _prefill(model, token_ids[:-count])[1], []
    for token_id in token_ids[-count:]:
        logits.append(model.logits(model(_rows(model, cache, [token_id])).hidden))
        cache.commit(torch.zeros(1, dtype=torch.long, device=logits[-1].device))
    return torch.cat(logits)


def _as_tree(model, token_ids, count: int) -> torch.Tensor:
    """The same tokens as the first child at each depth, with wrong siblings beside each."""
    cache = _prefill(model, token_ids[:-count])[1]
    nodes, parents, depths, path = [token_ids[-count]], [-1], [0], [0]
    for depth, token_id in enumerate(token_ids[-count + 1 :] if count > 1 else (), start=1):
        parent = path[-1]
        path.append(len(nodes) + FORK - 1)
        for copy in range(FORK):
            nodes.append(token_id if copy == FORK - 1 else (token_id + 1 + copy) % model.config.vocab_size)
            parents.append(parent)
            depths.append(depth)
    mask = torch.eye(len(nodes), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    rows = _rows(model, cache, nodes, torch.tensor(depths), mask, torch.tensor(parents))
    return model.logits(model(rows).hidden[torch.tensor(path, device=rows.token_ids.device)])
