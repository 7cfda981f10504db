"""A real drafter whose guesses are replaced by a knowing one's: it absorbs and drafts, and long paths are accepted."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree.audit.drafters import ScriptedDrafter, knowing


class GuidedDrafter:
    """Everything is the real drafter's but the candidates."""

    own_candidates = False

    def __init__(self, inner, guide: ScriptedDrafter) -> None:
        self._inner, self._guide = inner, guide

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def draft(self, sequences):
        self._inner.draft(sequences)
        return self._guide.draft(sequences)


def guided(drafter, scripts: Sequence[Sequence[int]], vocab_size: int) -> GuidedDrafter:
    return GuidedDrafter(drafter, knowing(scripts, vocab_size, drafter.block_size))
