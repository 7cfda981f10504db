"""Draft trees in the form SGLang's tree verify takes them. B sequences, N nodes each after padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddtree.tree.draft_tree import ROOT, DraftTree

NO_NODE = -1


@dataclass(frozen=True, eq=False)
class PackedTrees:
    """The trees of a batch, each padded to N nodes by further children of its root, which nothing accepts."""

    token_ids: np.ndarray  # [B, N] int64
    positions: np.ndarray  # [B, N] int64: context length + depth
    parents: np.ndarray  # [B, N] int64
    next_token: np.ndarray  # [B, N] int64: a node's first child, or -1
    next_sibling: np.ndarray  # [B, N] int64: its parent's next child, or -1
    mask: np.ndarray  # [sum of N * (context length + N)] bool: row by row, the committed tokens and the node's ancestors


def pack(trees: Sequence[DraftTree], context_lengths: Sequence[int], num_nodes: int) -> PackedTrees:
    """Pack trees of at most `num_nodes` nodes."""
    padded = [_padded(tree, num_nodes) for tree in trees]
    links = [first_children_and_siblings(tree.parents) for tree in padded]
    masks = [
        np.concatenate([np.ones((num_nodes, length), dtype=bool), tree.ancestor_mask()], axis=1).ravel()
        for tree, length in zip(padded, context_lengths, strict=True)
    ]
    return PackedTrees(
        token_ids=np.stack([tree.token_ids for tree in padded]),
        positions=np.stack([tree.depths + length for tree, length in zip(padded, context_lengths, strict=True)]).astype(np.int64),
        parents=np.stack([tree.parents for tree in padded]).astype(np.int64),
        next_token=np.stack([first for first, _ in links]),
        next_sibling=np.stack([sibling for _, sibling in links]),
        mask=np.concatenate(masks),
    )


def moves(paths: Sequence[np.ndarray], num_nodes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The copies that bring each path's rows to the front of its tree's, as steps of (target rows, source rows) of the batch.

    No step writes what it also reads: SGLang's copy loads and stores without a barrier between its warps.
    """
    steps: list[list[tuple[int, int]]] = []
    for number, path in enumerate(paths):
        first, read_in = number * num_nodes, {}
        for row, node in enumerate(path.tolist()):
            if node == row:
                continue
            read_in[node] = step = read_in.get(row, -1) + 1  # after whoever reads the row that is written
            if step == len(steps):
                steps.append([])
            steps[step].append((first + row, first + node))
    return [tuple(np.array(step, dtype=np.int64).T) for step in steps]


def first_children_and_siblings(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`parents [N]` as two links a node, [N] int64 each: its first child and its parent's next one."""
    first = np.full(len(parents), NO_NODE, dtype=np.int64)
    sibling = np.full(len(parents), NO_NODE, dtype=np.int64)
    for node in range(len(parents) - 1, ROOT, -1):
        parent = parents[node]
        sibling[node], first[parent] = first[parent], node
    return first, sibling


def _padded(tree: DraftTree, num_nodes: int) -> DraftTree:
    missing = num_nodes - tree.num_nodes
    if missing == 0:
        return tree
    return DraftTree(
        token_ids=np.concatenate([tree.token_ids, np.zeros(missing, dtype=np.int64)]),
        parents=np.concatenate([tree.parents, np.full(missing, ROOT, dtype=np.int32)]),
        depths=np.concatenate([tree.depths, np.ones(missing, dtype=np.int32)]),
        scores=np.concatenate([tree.scores, np.full(missing, -np.inf, dtype=np.float32)]),
    )
