"""How large the trees of one round may be, all of them together."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

from ddtree.engine.sequence import Sequence


def share_rows(nodes: SequenceOf[int], max_rows: int) -> list[int]:
    """Most nodes of each sequence so that all of them, roots included, are at most `max_rows` rows (0: no limit): who
    wants little gets it, the others share alike."""
    left, shares = max_rows - len(nodes), list(nodes)
    if not max_rows or sum(nodes) <= left:
        return shares
    order = sorted(range(len(nodes)), key=lambda index: nodes[index])
    for place, index in enumerate(order):
        shares[index] = min(nodes[index], left // (len(order) - place))
        left -= shares[index]
    return shares


@contextmanager
def limited(sequences: SequenceOf[Sequence], room: SequenceOf[int]):
    """For one round, trees of at most `room` nodes."""
    before = []
    for sequence, most in zip(sequences, room, strict=True):
        before.append(sequence.tree_budget)
        if sequence.auto is not None:
            sequence.auto.room = most
        elif most < sequence.tree_budget:
            sequence.tree_budget = most
    try:
        yield
    finally:
        for sequence, budget in zip(sequences, before, strict=True):
            if sequence.auto is None:
                sequence.tree_budget = budget
