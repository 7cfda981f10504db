"""Run requests and check every step in the order of cause; the first thing that is wrong is where it went wrong.

Each round: is the tree a tree; were its rows given the right tokens, positions and ancestors; does every part of every
layer compute what the nodes' paths alone would; do the logits choose the tokens; is the kept path the longest, cut at the
right stop; is what was committed what a fresh prefill of the same tokens holds; were the drafter's features the path's.
No list of faults: tensors are compared part by part, and a difference is explained by perturbing nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ddtree.audit.borrowed import limited
from ddtree.audit.committed import accept_faults, cache_fault, choice_faults, first_token_faults
from ddtree.audit.drafting import DrafterAudit
from ddtree.audit.findings import TARGET, Fault
from ddtree.audit.observe import run_alone
from ddtree.audit.tree_rows import TreeRows, row_faults, tree_faults
from ddtree.audit.watch import Record, watched
from ddtree.engine.request import Request

MOST_ROUNDS = 6
MOST_FRESH = 4  # prefills kept: two for each of two requests side by side


@dataclass
class Inspection:
    """Faults in the order of their finding, and the rounds that were looked at."""

    faults: list[Fault] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def num_rounds(self) -> int:
        return sum(record.tree is not None for record in self.records)


class Inspector:
    """Localises on one engine. `near_tie` is the margin in logits below which a choice may go either way."""

    def __init__(self, engine, near_tie: float = 0.0) -> None:
        self.engine, self.near_tie = engine, near_tie
        self.model = engine.target.model
        self._fresh: dict[tuple[int, ...], tuple] = {}  # tokens -> their forward, their cache; the last few

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], drafter=None, most_rounds: int = MOST_ROUNDS, skip: int = 0) -> Inspection:
        """Run `requests` side by side and check their steps until one is wrong. The first `skip` rounds are only run."""
        found, engine = Inspection(), self.engine
        audit = DrafterAudit.of(engine.drafter if drafter is None else drafter, engine.target)
        with watched(engine, drafter) as watch, limited(engine, max_running=len(requests)):
            going, rounds = {engine.add(request) for request in requests}, 0
            while going:
                emissions = [each for each in engine.step() if each.request_id in going]
                failed = next((each.error for each in emissions if each.error), None)
                if failed:
                    found.faults.append(Fault(TARGET, f"the round failed: {failed}"))
                    break
                going -= {each.request_id for each in emissions if each.finish_reason}
                records = watch.finish_step()
                watch.observer.take()
                rounds += any(record.tree is not None for record in records)
                # Hooks see our own forwards too: they must not enter the next record.
                watch.observer.deep = False
                for record in records:
                    if not found.faults and (record.tree is None or rounds > skip):
                        self._look(record, audit, found)
                watch.observer.deep = True
                watch.observer.take()
                if found.faults or rounds >= skip + most_rounds:
                    break
            for request_id in going:
                engine.abort(request_id)
        return found

    def _look(self, record: Record, audit, found: Inspection) -> None:
        found.records.append(record)
        number = sum(each.tree is not None for each in found.records)
        for fault in self._faults(record, audit):
            found.faults.append(replace(fault, budget=record.request.tree_budget, round=number))
            break

    def _faults(self, record: Record, audit) -> Iterator[Fault]:
        """In the order of cause; only the first counts."""
        if record.tree is not None:
            if audit is not None:
                yield from audit.draft_faults(record)
            yield from tree_faults(record)
            if audit is not None:
                yield from audit.score_faults(record)
            yield from row_faults(record)
            fault = TreeRows(self.model, record, self._prefilled(record.tokens_before[:-1])[1]).fault()
            if fault is not None:
                yield fault
            yield from choice_faults(self.model, record, self.near_tie)
            yield from accept_faults(record)
        fresh, cache = self._prefilled(record.tokens_after[:-1])
        if record.tree is None:
            yield from first_token_faults(record, fresh.hidden, self.model, self.near_tie)
        fault = cache_fault(record, fresh, cache)
        if fault is not None:
            yield fault
        if audit is not None:
            yield from audit.context_faults(record, fresh)

    def _prefilled(self, token_ids: list[int]):
        """A fresh prefill of the tokens: its forward and its cache. One round's end is the next one's beginning."""
        key = tuple(token_ids)
        if key not in self._fresh:
            while len(self._fresh) >= MOST_FRESH:
                self._fresh.pop(next(iter(self._fresh)))
            self._fresh[key] = run_alone(self.model, token_ids, commit=True)
        return self._fresh[key]
