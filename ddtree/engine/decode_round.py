"""The algorithm: draft, build, verify, accept, commit (DDTree arXiv 2604.12989, Algorithm 1; docs/decode_round.md)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddtree.engine.auto import AutoBudget
from ddtree.engine.finish import Finish, scan
from ddtree.engine.round_report import Place
from ddtree.engine.sequence import Sequence
from ddtree.engine.stats import StageClock
from ddtree.tree.accept import Acceptance, accept
from ddtree.tree.build import build_chain, build_ddtree
from ddtree.tree.draft_tree import DraftTree


class Seen(NamedTuple):
    """What a round verified and accepted, as arrays. One on the device makes them when asked (`round_report.Place`)."""

    tree: DraftTree
    acceptance: Acceptance

    @property
    def scores(self) -> np.ndarray:
        return self.tree.scores


@dataclass(eq=False, slots=True)
class Round:
    """What one round did for one sequence. With many sequences making arrays of it costs more than the rest of the host's work,
    so `tree`, `acceptance` and `kept` are made when somebody looks."""

    token_ids: list[int]  # kept: cut at a stop; what was committed and emitted
    num_drafted: int  # nodes verified, the root excluded
    acceptance_length: int  # as verified
    seen: Seen | Place
    finish: Finish | None = None
    fault: Exception | None = None  # in this sequence's own part, which committed nothing
    scoring: str | None = None  # how the tree was ranked, factorised or conditioned; None where nothing was drafted
    budget: int = 0  # most nodes that were asked for

    @property
    def tree(self) -> DraftTree:
        return self.seen.tree

    @property
    def acceptance(self) -> Acceptance:
        """As verified."""
        return self.seen.acceptance

    @property
    def kept(self) -> Acceptance:
        """As committed."""
        acceptance, count = self.acceptance, len(self.token_ids)
        nothing = np.empty(0, dtype=np.int64)
        return acceptance.cut(count) if count else Acceptance(nothing, acceptance.bonus_token, nothing)


class CommitFailed(RuntimeError):
    """The round was decided, and `token_ids` have it, but not every cache: those have to be computed again. `rounds` are what
    `decode_round` would have returned."""

    def __init__(self, rounds: list[Round]):
        super().__init__("a commit failed")
        self.rounds = rounds


def decode_round(
    drafter, target, sequences: SequenceOf[Sequence], clock: StageClock, auto: AutoBudget | None = None
) -> list[Round]:
    """Emit at least one token for every sequence. The last one emitted is its next root.

    A sequence that does not draft gets a tree of one node: plain decoding is a round with budget 0. `auto` plans and
    cuts the trees of the sequences that left their budget to it.
    """
    if auto:
        auto.plan(sequences)
    with clock("draft"):
        candidates = drafter.draft(sequences) if drafter else [None] * len(sequences)
    with clock("build"):
        if auto:
            candidates = auto.calibrate(sequences, candidates)
        trees = [grow(sequence, found) for sequence, found in zip(sequences, candidates, strict=True)]
        if auto:
            trees = auto.buy(sequences, trees)
    with clock("verify"):
        target_tokens = target.verify(sequences, trees)
    with clock("accept"):
        # The longest path that the target itself would have written, cut where the request ends.
        accepted = map(accept, trees, target_tokens)
        scorings = [None if found is None else found.scoring for found in candidates]
        rounds = [contained(*each) for each in zip(sequences, trees, accepted, scorings, strict=True)]
    with clock("commit"):
        for sequence, each in zip(sequences, rounds, strict=True):
            sequence.token_ids.extend(each.token_ids)
        try:
            features = target.commit(sequences, [each.kept.path for each in rounds])
            if drafter:
                drafter.commit(sequences, features)
        except Exception as error:
            raise CommitFailed(rounds) from error
    if auto:
        auto.learn(sequences, rounds, clock)
    return rounds


def grow(sequence: Sequence, candidates) -> DraftTree:
    """The sequence's tree for this round; the root alone where nothing was drafted."""
    if candidates is None:
        return DraftTree.root_only(sequence.root_token)
    build = build_chain if sequence.request.chain else build_ddtree
    return sequence.prune(build(sequence.root_token, candidates, sequence.build_budget))


def contained(sequence: Sequence, tree: DraftTree, acceptance: Acceptance, scoring: str | None) -> Round:
    """A round of the host's as it ends."""
    budget = sequence.tree_budget if sequence.drafts else 0
    return settle(sequence, acceptance.token_ids.tolist(), tree.num_drafted, Seen(tree, acceptance), scoring, budget)


def settle(
    sequence: Sequence, token_ids: list[int], num_drafted: int, seen: Seen | Place, scoring: str | None, budget: int
) -> Round:
    """What is kept of what was accepted: all of it, or what lies before the request's end. A fault, such as a watcher's, is the
    sequence's own and commits nothing."""
    length = len(token_ids)
    try:
        finish = scan(token_ids, sequence.request, sequence.num_emitted)
    except Exception as error:
        return Round([], num_drafted, length, seen, None, error)
    kept = token_ids if finish is None else token_ids[: finish.num_kept]
    return Round(kept, num_drafted, length, seen, finish, None, scoring if num_drafted else None, budget)
