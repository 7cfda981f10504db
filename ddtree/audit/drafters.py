"""Drafters without a model: one that knows the answer and hides it among wrong siblings, one that knows nothing.

The output must not depend on the drafter. The first makes long accepted paths with rejected nodes before, beside and
below them, whatever the real drafter's skill; the second makes trees that are wrong everywhere.

Letters: D depths, M candidates per depth.
"""

from __future__ import annotations

import numpy as np

from ddtree.tree.build import Candidates

BLOCK_SIZE = 8
MOST_CANDIDATES = 12  # per depth; deeper trees show more than wider ones


class ScriptedDrafter:
    """Proposes a script's next tokens, each with probability `skill` and at a random rank; else only wrong tokens."""

    max_context = None

    def __init__(self, scripts, vocab_size: int, skill: float, block_size: int = BLOCK_SIZE, seed: int = 0) -> None:
        self.scripts = [list(script) for script in scripts]  # each a prompt and its answer
        self.vocab_size, self.skill, self.block_size = vocab_size, skill, block_size
        self.rng = np.random.default_rng(seed)

    def open(self, sequence) -> None:
        sequence.drafter_state = self

    def close(self, sequence) -> None:
        sequence.drafter_state = None

    def absorb(self, sequence, features) -> None:
        """Features say nothing to it."""

    def absorb_together(self, sequences, features) -> None:
        """Features say nothing to it."""

    def commit(self, sequences, features) -> None:
        """Features say nothing to it."""

    def draft(self, sequences) -> list[Candidates | None]:
        return [self._candidates(sequence) for sequence in sequences]

    def _candidates(self, sequence) -> Candidates | None:
        depth = min(self.block_size - 1, sequence.tree_budget, sequence.num_remaining - 1)
        if not sequence.drafts or depth < 1:
            return None
        width = min(MOST_CANDIDATES, sequence.tree_budget, self.vocab_size - 1)
        first = len(sequence.token_ids)
        truth = self._script(sequence.request.prompt_token_ids)[first : first + depth]
        token_ids = np.stack([self._row(truth[d] if d < len(truth) else None, width) for d in range(depth)])
        # Falling by rank, and alike at all depths: the tree is deep and wide at once.
        log_probs = np.log(0.6) + np.log(0.5) * np.arange(width, dtype=np.float32)
        return Candidates(token_ids, np.broadcast_to(log_probs, token_ids.shape).astype(np.float32))

    def _script(self, prompt) -> list[int]:
        return next((script for script in self.scripts if script[: len(prompt)] == list(prompt)), [])

    def _row(self, true: int | None, width: int) -> np.ndarray:
        drawn = self.rng.choice(self.vocab_size, size=min(width + 1, self.vocab_size), replace=False)
        wrong = drawn[drawn != (-1 if true is None else true)][:width].astype(np.int64)
        if true is not None and self.rng.random() < self.skill:
            wrong[self.rng.integers(min(3, len(wrong)))] = true
        return wrong


def knowing(scripts, vocab_size: int, block_size: int | None, seed: int = 0) -> ScriptedDrafter:
    """Mostly right about each of the scripts."""
    return ScriptedDrafter(scripts, vocab_size, 0.9, max(block_size or 0, BLOCK_SIZE), seed)


def ignorant(vocab_size: int, block_size: int | None, seed: int = 1) -> ScriptedDrafter:
    """Always wrong, but for chance."""
    return ScriptedDrafter((), vocab_size, 0.0, max(block_size or 0, BLOCK_SIZE), seed)
