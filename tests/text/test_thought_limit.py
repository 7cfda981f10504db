"""A limited thought: whatever is drawn, it ends at the limit, and every tree node is judged by its own path."""

import numpy as np
import pytest

from ddtree.text.parse import Thought
from ddtree.text.thought_limit import CLOSING, ThoughtLimit
from tests.server.fakes import EOS, VOCAB, ByteTokenizer


def limit_of(limit, thought=Thought.OPEN):
    return ThoughtLimit(ByteTokenizer(), VOCAB, thought, limit)


def allowed_after(limiter, emitted):
    """The ids that may follow the emitted ones; None for all."""
    limiter.follow(emitted)
    return ids_of(limiter.allowed_after(()))


def ids_of(mask):
    return None if mask is None else np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def written(limiter, wanted):
    """The wanted tokens, and between them whatever is demanded."""
    emitted, wishes = [], list(wanted)
    while wishes:
        allowed = allowed_after(limiter, emitted)
        emitted.append(allowed[0] if allowed and len(allowed) == 1 else wishes.pop(0))
    return bytes(emitted).decode(errors="replace")


def test_the_end_tag_comes_at_the_limit_and_then_all_is_free():
    assert written(limit_of(5), b"thinking forever, <think> and ever") == "think" + CLOSING + "ing forever, <think> and ever"


def test_a_thought_that_ends_before_is_left_alone():
    text = b"short</think>\n\nand a long answer, longer than the limit"
    assert written(limit_of(20), text) == text.decode()


@pytest.mark.parametrize("start", [b"<think>", b" \n<think>"])
def test_only_text_that_opens_with_the_tag_is_a_thought(start):
    text = (start + b"abcdefghij").decode()
    assert written(limit_of(12, Thought.UNDECIDED), text.encode()) == text[:12] + CLOSING + text[12:]
    plain = b"no thought at all, <think> is quoted"
    assert written(limit_of(3, Thought.UNDECIDED), plain) == plain.decode()
    # While it is not clear whether it is one, nothing is closed.
    assert written(limit_of(2, Thought.UNDECIDED), b"<think>ab") == "<think>" + CLOSING + "ab"


def test_a_character_is_finished_first():
    assert written(limit_of(6), "abcd🙂efgh".encode()) == "abcd🙂" + CLOSING + "efgh"
    # Bytes that never become a character do not hold it up for long.
    assert written(limit_of(6), [0xF0] * 12) == "\ufffd" * 9 + CLOSING + "\ufffd" * 3


def test_trees_are_judged_node_by_node():
    rng = np.random.default_rng(5)
    for limit in (1, 3, 6, 9):
        emitted = list(b"abc")
        for _ in range(20):
            limiter = limit_of(limit)
            limiter.follow(emitted[: int(rng.integers(0, 4))])
            root = limiter._num_followed
            size = 24
            parents = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, size))])
            pool = [*CLOSING.encode(), ord("x"), EOS]
            token_ids = np.array([emitted[root - 1] if root else 0, *rng.choice(pool, size - 1)])
            fits = limiter.fits(token_ids, parents)
            for node in range(size):
                path, at = [], node
                while at > 0:
                    path, at = [int(token_ids[at]), *path], int(parents[at])
                alone = limit_of(limit)
                alone.follow(emitted[:root])
                fit = True
                for step, token_id in enumerate(path):
                    may = allowed_after(alone, emitted[:root] + path[:step])
                    fit = fit and (may is None or token_id in may)
                assert fits[node] == fit, (limit, node)
                if fit:
                    assert allowed_after(alone, emitted[:root] + path) == ids_of(limiter.allowed_after(path))


def test_a_copy_goes_its_own_way():
    first = limit_of(4)
    first.follow(list(b"abc"))
    second = first.copy()
    assert allowed_after(first, list(b"abcd")) == [ord("\n")] and allowed_after(second, list(b"abc")) is None
