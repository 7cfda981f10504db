"""SGLang's grammar of a request (`response_format`, `regex`, `ebnf`) as our engine's: asked along one path of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class SglangGrammar:
    """A `TokenGrammar`. SGLang itself advances its grammar by what was emitted, before the next round."""

    error: str | None = None

    def __init__(self, req, vocab_size: int) -> None:
        self._req, self._vocab_size = req, vocab_size
        self._mask = req.grammar.allocate_vocab_mask(vocab_size=vocab_size, batch_size=1, device="cpu")

    def follow(self, emitted: Sequence[int]) -> None:
        """Nothing: SGLang has done it."""

    def fits(self, token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """`[N]` bool: all of them; what the grammar forbids is not chosen, so it is not accepted."""
        return np.ones(len(token_ids), dtype=bool)

    def allowed_after(self, path: Sequence[int]) -> np.ndarray | None:
        """The bits of what may follow `path`, `[ceil(V / 8)]` uint8; None where nothing is said any more."""
        grammar, taken = self._req.grammar, 0
        try:
            for token_id in path:
                if grammar.is_terminated():  # it then accepts in silence, and a rollback would go too far
                    return None
                grammar.accept_token(int(token_id))
                taken += 1
            if grammar.is_terminated():
                return None
            self._mask.fill_(-1)
            grammar.fill_vocab_mask(self._mask, 0)
        finally:
            if taken:
                grammar.rollback(taken)
        return self._mask[0].numpy().view(np.uint8)[: -(-self._vocab_size // 8)].copy()
