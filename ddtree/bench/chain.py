"""The chain to compare trees with: the same drafter, its best token at each depth and nothing beside it."""

from __future__ import annotations

from ddtree.engine.engine import Engine
from ddtree.tree.build import Candidates


class ChainDrafter:
    """A drafter whose candidates are cut to one per depth, so that every tree built from them is a chain."""

    def __init__(self, drafter):
        self._drafter = drafter

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)

    def draft(self, sequences) -> list[Candidates | None]:
        return [found and found.chain() for found in self._drafter.draft(sequences)]


def chain_engine(engine: Engine) -> Engine:
    """An engine of the same target and drafter that verifies chains of up to block_size - 1 nodes."""
    return Engine(engine.target, ChainDrafter(engine.drafter), engine.config, engine.vocab_size)
