"""A thought of at most so many tokens: from there on its end tag is the only way on, per node along its own path.

It is a TokenGrammar of the engine, around another one where the request has one. What may follow depends on the tokens
before alone, so the answer is the same at every tree budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ddtree.text.grammar import Grammar
from ddtree.text.parse import THINK_END, THINK_START, Thought
from ddtree.text.tokenizer import Tokenizer

CLOSING = f"\n{THINK_END}\n\n"
LONGEST_WAIT = 3  # tokens; a character has at most four bytes
BEFORE, INSIDE, CLOSING_NOW, AFTER = range(4)


class State(NamedTuple):
    """Where a path stands. `tail` is the text that a tag may still need; `forced` counts tokens of CLOSING written."""

    place: int
    num_tokens: int = 0
    tail: bytes = b""
    forced: int = 0


class ThoughtLimit:
    """`limit` counts every token from the start of the answer on, the opening tag's included, the end tag's not.

    A character that is half written at the limit is finished first, which may take up to three tokens more.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, thought: Thought, limit: int, inner: Grammar | None = None):
        self._token_bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._closing = tokenizer.encode(CLOSING, add_special_tokens=False)
        self._vocab_size, self._limit, self._inner = vocab_size, limit, inner
        place = {Thought.OPEN: INSIDE, Thought.UNDECIDED: BEFORE}.get(thought, AFTER)
        self._state, self._num_followed = State(place), 0

    @property
    def error(self) -> str | None:
        """See TokenGrammar."""
        return None if self._inner is None else self._inner.error

    def copy(self) -> ThoughtLimit:
        """Another generation's, in the same state."""
        copied = object.__new__(ThoughtLimit)
        copied.__dict__ |= self.__dict__ | {"_inner": None if self._inner is None else self._inner.copy()}
        return copied

    def follow(self, emitted: Sequence[int]) -> None:
        """See TokenGrammar."""
        for token_id in emitted[self._num_followed :]:
            self._state = self._after(self._state, token_id)
        self._num_followed = len(emitted)
        if self._inner is not None:
            self._inner.follow(emitted)

    def fits(self, token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """See TokenGrammar."""
        fits = np.ones(len(parents), dtype=bool) if self._inner is None else self._inner.fits(token_ids, parents)
        if self._is_near(len(parents)):
            fits &= [state is not None for state in self._states(token_ids, parents)]
        return fits

    def allowed_after(self, path: Sequence[int]) -> np.ndarray | None:
        """See TokenGrammar."""
        state = self._state
        for token_id in path:
            state = self._after(state, token_id)
        if state.place != CLOSING_NOW:
            return None if self._inner is None else self._inner.allowed_after(path)
        mask, token_id = np.zeros((self._vocab_size + 31) // 32 * 4, dtype=np.uint8), self._closing[state.forced]
        mask[token_id // 8] = 1 << token_id % 8
        return mask

    def _is_near(self, num_nodes: int) -> bool:
        """Can a path of so many nodes reach the limit? Most rounds are far from it, and cost nothing."""
        return self._state.place != AFTER and self._state.num_tokens + num_nodes >= self._limit

    def _states(self, token_ids: np.ndarray, parents: np.ndarray) -> Iterator[State | None]:
        """Of each node in order; None where its path leaves what is allowed. The root is among the emitted tokens."""
        states: list[State | None] = [self._state]
        yield self._state
        for token_id, parent in zip(token_ids[1:].tolist(), parents[1:].tolist(), strict=True):
            before = states[parent]
            wrong = before is None or before.place == CLOSING_NOW and token_id != self._closing[before.forced]
            states.append(None if wrong else self._after(before, token_id))
            yield states[-1]

    def _after(self, state: State, token_id: int) -> State:
        """The state behind one more token."""
        if state.place == AFTER:
            return state
        if state.place == CLOSING_NOW:
            forced = state.forced + 1
            return State(AFTER) if forced == len(self._closing) else state._replace(forced=forced)
        place, text, count = state.place, state.tail + self._token_bytes(token_id), state.num_tokens + 1
        if place == BEFORE:
            body = text.lstrip()
            if body.startswith(THINK_START.encode()):
                place, text = INSIDE, body[len(THINK_START) :]
            elif not THINK_START.encode().startswith(body):
                return State(AFTER)
        if place == INSIDE:
            if THINK_END.encode() in text:
                return State(AFTER)
            text = text[-(len(THINK_END) - 1) :]
            if count >= self._limit and (_ends_whole(text) or count >= self._limit + LONGEST_WAIT):
                place = CLOSING_NOW
        return State(place, count, text)


def _ends_whole(text: bytes) -> bool:
    """Does UTF-8 text end with a whole character? What is no UTF-8 at all cannot be waited for."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            return back >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            break
    return True
