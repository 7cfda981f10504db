"""Is a tree ranked by what its candidates are worth? A wrong score is lossless: only acceptance shows it.

Scores that know their path are computed a second time from the adapter's tensors, path by path, and every tree's own scores
and shape are held against them. Letters: K block slots, D = K - 1 depths, M candidates per depth, C model width, n path nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from ddtree.audit.findings import DRAFTER, Fault
from ddtree.audit.tree_rows import path_to
from ddtree.models.adapter import LEAST_LOG_PROB, LEAST_REST, PAIRWISE

LIMIT_NATS = 50.0  # per unit of the rows' tolerance (audit.compare): 0.025 nats in fp32, 5 in bf16, where sums along a path round
MOST_PATHS = 6  # looked at per round, the deepest first and the others as they come

# (tokens of a path, the root first) -> [n, M] log-probabilities of the candidates below each of them
Rows = Callable[[list[int]], np.ndarray]


class AdapterTwin:
    """The adapter's formula for one path, from its tensors."""

    def __init__(self, adapter, model) -> None:
        self.adapter, self.weights = adapter, dict(adapter.state_dict())
        self.embedding, self.head = model.embed_tokens, model.lm_head.weight

    def rows(self, slots: torch.Tensor, tokens: list[int], token_ids: np.ndarray, own: np.ndarray) -> np.ndarray:
        """[n, M] float32 below each of `tokens`, at most D; `slots` [K, C] of the block, `token_ids` and the drafter's `own` [D, M]."""
        tokens = tokens[: len(token_ids)]
        rows = F.embedding(torch.tensor(tokens, device=slots.device), self.embedding).to(slots.dtype)
        place = self._linear("child_slot", slots[1:]) + self._linear("parent_slot", slots[:-1]) + self.weights["depth"][: len(slots) - 1]
        inputs = place[: len(tokens)] + self._linear("root_token", rows[:1]) + self._linear("parent_token", rows)
        kind = self.adapter.config.summary
        if kind not in PAIRWISE:
            inputs = inputs + self.adapter.summarise(inputs[None])[0]
        out = self._finish("", inputs)
        if kind == "grandparent" and len(tokens) > 1:
            older = self._linear("older_slot", slots[2 : len(tokens) + 1]) + self.weights["older_depth"][1 : len(tokens)]
            out[1:] += self._finish("older_", older + self._linear("older_token", rows[:-1]))
        return np.stack([self._scores(*each) for each in zip(out.float(), token_ids, own, strict=False)])

    def _scores(self, out: torch.Tensor, token_ids: np.ndarray, own: np.ndarray) -> np.ndarray:
        head = F.embedding(torch.from_numpy(token_ids).to(out.device), self.head).to(self.weights["candidate_token.weight"].dtype)
        query, weight, elsewhere = out[:-2], out[-2], out[-1:]
        ranking = torch.from_numpy(own).to(out.device)
        corrections = self._linear("candidate_token", head).float() @ query + weight * ranking.clamp(min=LEAST_LOG_PROB)
        rest = torch.log1p(-ranking.exp().sum().clamp(max=1 - LEAST_REST))
        return torch.cat([ranking + corrections, rest + elsewhere]).log_softmax(dim=0)[:-1].cpu().numpy()

    def _finish(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(inputs)
        return self._linear(f"{name}out", hidden + F.silu(self._linear(f"{name}mix", hidden)))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def score_faults(tree, budget: int, token_ids: np.ndarray, rows: Rows, limit: float, scoring: str) -> Iterator[Fault]:
    """Every node of some paths scores its parent's score and its own row's; no child that is worth more than the tree's least is
    left out, and none at all where the tree has fewer nodes than its `budget`.

    `token_ids` [D, M]: the candidates that `rows` are of. `limit`: nats that two computations may be apart.
    """
    children = {(int(parent), int(token)): node for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True)) if node}
    least = float(tree.scores.min()) if tree.num_drafted >= budget else -np.inf
    for leaf in _some_leaves(tree):
        path = path_to(leaf, tree.parents)
        found = rows([int(tree.token_ids[node]) for node in path])
        for depth, row in enumerate(found):
            parent = path[depth]
            due = tree.scores[parent] + row
            for token, score in zip(token_ids[depth].tolist(), due.tolist(), strict=True):
                node = children.get((parent, token))
                if node is None and score > least + limit:
                    beside = f"the tree's least node {least:.3f}" if np.isfinite(least) else f"the tree has {tree.num_drafted} of {budget} nodes"
                    where = f"token {token} at depth {depth + 1} below node {parent} scores {score:.3f}, {beside}"
                    yield Fault(DRAFTER, f"draft tree: {where}, and is left out: it is not the best-first tree")
                    return
                if node is not None and not abs(score - float(tree.scores[node])) <= limit:
                    where = f"node {node} (token {token}, depth {depth + 1}, below node {parent}) scores {float(tree.scores[node]):.3f}"
                    yield Fault(DRAFTER, f"draft tree: {where}; by {scoring} it is {score:.3f}")
                    return


def _some_leaves(tree) -> list[int]:
    inner = set(tree.parents[1:].tolist())
    leaves = [node for node in range(tree.num_nodes) if node not in inner]
    deepest = sorted(leaves, key=lambda node: -tree.depths[node])[: MOST_PATHS // 2]
    return list(dict.fromkeys([*deepest, *leaves]))[:MOST_PATHS]
