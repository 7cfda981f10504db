"""Tree rows against the same nodes' paths run alone, and which node moves which: the target's side of a round.

Letters: N nodes, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ddtree.audit.compare import moved, row_errors, tolerance
from ddtree.audit.findings import TARGET, TREE, Fault
from ddtree.audit.observe import KEYS, OUTPUT, VALUES, Forward, Stage, rerun, run_after, run_alone
from ddtree.audit.watch import Record

MOST_LEAVES = 6  # paths run alone per round
MOST_SUSPECTS = 48  # nodes tried when one node is known to be wrong
LABELS = {
    "recurrent": "recurrent state", "self_attn": "attention", "mixer": "attention", "mlp": "MLP",
    "input_layernorm": "input norm", "post_attention_layernorm": "norm before the MLP",
}  # fmt: skip


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from the root to `node`."""
    path = [int(node)]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def label(stage: Stage, forward: Forward) -> str:
    """`layer 5 recurrent state`."""
    layer, part = stage
    if part in ("mixer", "self_attn") and (layer, "recurrent") in forward.parts:
        return f"layer {layer} linear attention"
    return f"layer {layer} {LABELS.get(part, part)}"


def relation(node: int, other: int, parents) -> str:
    """How `node` is called when it meddles with `other`."""
    if parents[node] == parents[other]:
        return f"sibling {node}"
    return f"descendant {node}" if other in path_to(node, parents) else f"node {node}"


def tree_faults(record: Record) -> Iterator[Fault]:
    """Is it a tree, of this root, within its budget?"""
    tree, root = record.tree, record.tokens_before[-1]
    if int(tree.token_ids[0]) != root:
        yield Fault(TREE, f"draft tree: node 0 holds token {int(tree.token_ids[0])}, the root is token {root}")
    for node in range(1, tree.num_nodes):
        if not 0 <= tree.parents[node] < node:
            yield Fault(TREE, f"draft tree: node {node}'s parent is {int(tree.parents[node])}, not a node before it")
            return
    for node in range(tree.num_nodes):
        depth = len(path_to(node, tree.parents)) - 1
        if tree.depths[node] != depth:
            yield Fault(TREE, f"draft tree: node {node} says depth {int(tree.depths[node])}, it lies {depth} below the root")
            break
    edges = set(zip(tree.parents[1:].tolist(), tree.token_ids[1:].tolist(), strict=True))
    if len(edges) < tree.num_drafted:
        yield Fault(TREE, "draft tree: two siblings carry the same token")
    if tree.num_drafted > record.tree_budget:
        yield Fault(TREE, f"draft tree: {tree.num_drafted} drafted nodes, the budget is {record.tree_budget}")


def row_faults(record: Record) -> Iterator[Fault]:
    """What was asked of the model, against the tree: tokens, positions, ancestors, parents."""
    tree, rows = record.tree, record.forward.rows
    start = len(record.tokens_before) - 1
    paths = [path_to(node, tree.parents) for node in range(tree.num_nodes)]
    given = rows.token_ids.tolist()
    for node, (actual, expected) in enumerate(zip(given, tree.token_ids.tolist(), strict=False)):
        if actual != expected:
            yield Fault(TARGET, f"verify rows: row {node} holds token {actual}, node {node} is token {expected}")
            break
    for node, (actual, path) in enumerate(zip(rows.positions.tolist(), paths, strict=False)):
        if actual != start + len(path) - 1:
            yield Fault(
                TARGET,
                f"position: node {node} is given position {actual}; context length {start} + depth {len(path) - 1} "
                f"is {start + len(path) - 1}",
            )
            break
    if tree.num_nodes > 1:
        yield from _mask_faults(rows.spans[0], paths, tree.parents)


def _mask_faults(span, paths, parents) -> Iterator[Fault]:
    if span.ancestor_mask is None:
        yield Fault(TARGET, f"ancestor mask: none for a tree of {len(paths)} nodes, which then reads as a sequence")
    else:
        expected = np.zeros((len(paths), len(paths)), dtype=bool)
        for node, path in enumerate(paths):
            expected[node, path] = True
        wrong = np.argwhere(span.ancestor_mask.cpu().numpy() != expected)
        if len(wrong):
            node, other = (int(index) for index in wrong[0])
            if node == other:
                where = f"ancestor mask: node {node} does not see itself"
            elif expected[node, other]:
                where = f"ancestor mask: node {node} does not see its ancestor {other}"
            else:
                where = f"ancestor mask: {relation(other, node, parents)} leaks into node {node}"
            yield Fault(TARGET, where)
    if span.parents is None or span.parents.tolist() != list(parents):
        shown = "none" if span.parents is None else "others"
        yield Fault(TARGET, f"parents: the rows carry {shown} than the tree's; a convolution would read wrong windows")


class TreeRows:
    """One round's rows beside fresh runs of their paths."""

    def __init__(self, model, record: Record, fresh_cache) -> None:
        """`fresh_cache` holds the committed tokens of before the round, from one prefill."""
        self.model, self.record, self.tree, self.live = model, record, record.tree, record.forward
        self.committed = record.tokens_before[:-1]
        self.dtype = self.live.hidden.dtype
        self.alone: dict[int, Forward] = {}  # leaf -> its path run alone
        self._cache = fresh_cache
        self._still: Forward | None = None

    def errors(self) -> dict[Stage, dict[int, float]]:
        """Per part, in the order of computation, each compared node's relative error."""
        found: dict[Stage, dict[int, float]] = {stage: {} for stage in self.live.parts}
        for leaf in self._leaves():
            path = path_to(leaf, self.tree.parents)
            alone = self.run_path(leaf)
            for stage, actual in self.live.parts.items():
                if stage in alone.parts:
                    rows = torch.as_tensor(path, device=actual.device)
                    errors = row_errors(actual[rows], alone.parts[stage][-len(path) :])
                    for node, error in zip(path, errors.tolist(), strict=True):
                        # Paths share nodes; only the first one owes nothing to a commit.
                        found[stage][node] = max(error, found[stage].get(node, 0.0))
        return found

    def run_path(self, leaf: int) -> Forward:
        """The path to `leaf` as consecutive tokens: the first one asked for from scratch, without any commit, the
        others after the fresh cache."""
        if leaf not in self.alone:
            tokens = self.tree.token_ids[path_to(leaf, self.tree.parents)].tolist()
            if self.alone:
                self.alone[leaf] = run_after(self.model, self._cache, tokens)
            else:
                self.alone[leaf] = run_alone(self.model, [*self.committed, *tokens])[0]
        return self.alone[leaf]

    def fault(self) -> Fault | None:
        """The first part that is not what the path alone would have computed, explained."""
        limit = tolerance(self.dtype)
        errors = self.errors()
        for stage, nodes in errors.items():
            bad = [node for node, error in sorted(nodes.items()) if error > limit]
            if bad:
                return self._explain(stage, bad[0], nodes[bad[0]], errors)
        return self.leak()

    def leak(self) -> Fault | None:
        """Change every node outside a path at once: nothing on the path may move, by more than rounding."""
        leaves = self._leaves()
        for leaf in dict.fromkeys((leaves[0], leaves[-1])):
            path = path_to(leaf, self.tree.parents)
            others = [node for node in range(1, self.tree.num_nodes) if node not in path]
            if not others:
                continue
            for stage, rows in self._moves(self._perturbed(*others)).items():
                moved_rows = [row for row in rows if row in path]
                if moved_rows:
                    found = self._leaking(stage, moved_rows[0])
                    where = f"{label(stage, self.live)}: node {moved_rows[0]} depends on nodes outside its path"
                    return found or Fault(TARGET, f"{where}, on none of them alone")
        return None

    def _leaking(self, stage: Stage, node: int, error: float | None = None) -> Fault | None:
        """The one node outside `node`'s path that moves it, siblings first."""
        parents = self.tree.parents
        suspects = [other for other in range(1, self.tree.num_nodes) if other not in path_to(node, parents)]
        suspects.sort(key=lambda other: (parents[other] != parents[node], abs(other - node)))
        for other in suspects[:MOST_SUSPECTS]:
            if node in self._moves(self._perturbed(other)).get(stage, ()):
                where = f"{label(stage, self.live)}: {relation(other, node, parents)} leaks into node {node}"
                return Fault(TARGET, where, measured=error)
        return None

    def _explain(self, stage: Stage, node: int, error: float, errors) -> Fault:
        parents, name = self.tree.parents, label(stage, self.live)
        if stage[1] == KEYS and max(errors.get((stage[0], VALUES), {0: 0.0}).values()) <= tolerance(self.dtype):
            where = f"layer {stage[0]} position: node {node}'s keys are turned as for another position (its values agree)"
            if not self._only_turned(stage, node):
                where = f"{name}: node {node}'s are not what its path alone computes (its values agree): their norm, not their position"
            return Fault(TARGET, where, measured=error)
        path = path_to(node, parents)
        leak = self._leaking(stage, node, error)
        if leak is not None:
            return leak
        for other in path[1:-1]:
            if node not in self._moves(self._perturbed(other)).get(stage, ()):
                return Fault(TARGET, f"{name}: node {node} does not see its ancestor {other}", measured=error)
        where = f"{name}: node {node} (depth {len(path) - 1}) is not what its path alone computes"
        return Fault(TARGET, f"{where}; no other node moves it", measured=error)

    def _only_turned(self, stage: Stage, node: int) -> bool:
        """Are the node's keys as long as they should be? Then only their angle is wrong."""
        leaf = next(leaf for leaf in self.alone if node in path_to(leaf, self.tree.parents))
        path = path_to(leaf, self.tree.parents)
        due = self.alone[leaf].parts[stage][path.index(node) - len(path)]
        held = self.live.parts[stage][node]
        return float(row_errors(held.norm(dim=-1)[None], due.norm(dim=-1)[None])[0]) <= tolerance(self.dtype)

    def _perturbed(self, *nodes: int) -> Forward:
        """The rows with other tokens at `nodes`."""
        tokens, vocabulary = self.live.rows.token_ids.clone(), self.model.config.vocab_size
        shift = 1 + int(tokens.sum()) % (vocabulary - 1)  # never a whole turn
        index = torch.as_tensor(nodes, device=tokens.device)
        tokens[index] = (tokens[index] + shift) % vocabulary
        return rerun(self.model, self.live.rows, self._cache, tokens)

    def _moves(self, changed: Forward) -> dict[Stage, list[int]]:
        """Per part the rows that are not what they were."""
        steady = self._steady()
        return {
            stage: torch.nonzero(row_errors(part, steady.parts[stage]) > moved(self.dtype)).flatten().tolist()
            for stage, part in changed.parts.items()
            if stage[1] != OUTPUT
        }

    def _steady(self) -> Forward:
        """The rows as they were, over the same fresh cache."""
        if self._still is None:
            self._still = rerun(self.model, self.live.rows, self._cache, self.live.rows.token_ids)
        return self._still

    def _leaves(self) -> list[int]:
        """The end of the accepted path first, then leaves spread over the tree."""
        inner = set(self.tree.parents.tolist())
        leaves = [node for node in range(self.tree.num_nodes) if node not in inner]
        last = [] if self.record.path is None or not len(self.record.path) else [int(self.record.path[-1])]
        return list(dict.fromkeys(last + self._spread(leaves, MOST_LEAVES)))

    @staticmethod
    def _spread(items: Sequence[int], most: int) -> list[int]:
        items = list(items)
        if len(items) <= most:
            return items
        return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
