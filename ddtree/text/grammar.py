"""Which tokens a grammar lets follow each node of a draft tree; the only place that knows llguidance.

A grammar is Lark text (`schema_lark`, `text.tools`). One matcher stands after the emitted tokens; for a tree it walks
down each branch and rolls back, so every node is judged by its own path. Letters: N nodes, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ddtree.text.parse import THINK_END, THINK_START, Thought
from ddtree.text.schema_refs import check_refs
from ddtree.text.tokenizer import Tokenizer

# JSON allows endless white space between tokens; a small model that falls for it would never end.
WHITE_SPACE = r"[ \n\r\t]{1,40}"


class GrammarCompiler:
    """Grammars over one vocabulary. The first one costs 0.2 s (49k tokens) to 2.6 s (248k), the others milliseconds."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Collection[int],
        literal_ids: Collection[int] = frozenset(),
    ) -> None:
        """`vocab_size` is the model's, `end_token_ids` may follow only a complete text; `literal_ids` are text though
        special."""
        from llguidance import LLTokenizer, TokenizerWrapper

        self._ends = frozenset(end_token_ids)
        self._vocab_size = vocab_size
        words = _Words(tokenizer, vocab_size, frozenset(tokenizer.special_ids) - frozenset(literal_ids), self._ends)
        self._words = LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size, eos_token=sorted(self._ends))

    def compile(self, lark: str) -> Grammar:
        """ValueError with the library's own words if there is no such grammar."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._words, lark, log_level=0)
        if matcher.is_error():
            raise ValueError(" ".join(matcher.get_error().split())[:300])
        return Grammar(matcher, self._vocab_size, self._ends)


class _Words:
    """The vocabulary in the form that llguidance asks for."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, special_ids: Collection[int], ends: Collection[int]
    ) -> None:
        self._encode = tokenizer.encode
        # A model's embedding may be padded beyond the tokenizer; those ids have no bytes, and no grammar allows them.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(special_ids | set(ends))
        self.eos_token_id = min(ends)

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode(errors="replace"), add_special_tokens=False)


class Grammar:
    """The engine's TokenGrammar. It never raises: after an error only an end token is allowed, and `error` says why."""

    def __init__(self, matcher: Any, vocab_size: int, end_token_ids: Collection[int]) -> None:
        self._matcher, self._ends = matcher, end_token_ids
        self._num_bytes = (vocab_size + 31) // 32 * 4
        self._num_followed = 0
        self.error: str | None = None

    def copy(self) -> Grammar:
        """Another generation's grammar in the same state, without compiling again."""
        copied = Grammar(self._matcher.deep_copy(), 0, self._ends)
        copied._num_bytes, copied._num_followed = self._num_bytes, self._num_followed
        return copied

    def follow(self, emitted: Sequence[int]) -> None:
        """Advance by the tokens emitted since the last call."""
        for token_id in emitted[self._num_followed :]:
            if token_id not in self._ends and not self.error and not self._matcher.consume_token(token_id):
                self._note_error()
        self._num_followed = len(emitted)

    def fits(self, token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """`[N]` bool: the nodes whose whole path the grammar lets be.

        One matcher goes down each branch and comes back. The root is among the emitted tokens already; an end token is
        no step of the matcher's, and nothing may follow it.
        """
        children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents[1:].tolist(), start=1):
            children[parent].append(node)
        fits = np.zeros(len(parents), dtype=bool)
        tokens = token_ids.tolist()

        def descend(node: int) -> None:
            fits[node] = True
            for child in children[node]:
                if tokens[child] in self._ends:
                    fits[child] = self._matcher.is_accepting()
                elif self._matcher.try_consume_tokens([tokens[child]]):
                    descend(child)
                    self._matcher.rollback(1)

        descend(0)
        return fits

    def allowed_after(self, path: Sequence[int]) -> np.ndarray | None:
        """`[ceil(V / 8)]` uint8 of bits, least significant first, padded to whole 32-bit words: what may follow the
        emitted tokens and then `path`; None after a path that the grammar does not let be, or that an end token ends."""
        if self._ends.intersection(path):
            return None
        num_taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        mask = None
        if num_taken == len(path):
            mask = np.zeros(self._num_bytes, dtype=np.uint8)
            self._fill(mask)
        if num_taken:
            self._matcher.rollback(num_taken)
        return mask

    def _fill(self, mask: np.ndarray) -> None:
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self._note_error()
        if self.error:
            mask[:] = 0
            for token_id in self._ends:
                mask[token_id // 8] |= 1 << token_id % 8

    def _note_error(self) -> None:
        self.error = " ".join((self._matcher.get_error() or "the grammar allows no such token").split())[:300]


def any_object_lark() -> str:
    """Rules for `answer`: any JSON object."""
    return schema_lark({"type": "object"})


def schema_lark(schema: Any) -> str:
    """Rules for `answer`: JSON that the schema allows."""
    return f"answer: {json_rule(schema)}\n"


def json_rule(schema: Any) -> str:
    """The body of a rule for JSON that the schema allows; not a schema at all is the compiler's to refuse.

    ValueError for what the compiler would take and no text can fit.
    """
    check_refs(schema)
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"%json {json.dumps(schema)}"


def whole_lark(answer: str, thought: Thought | None) -> str:
    """The grammar of a generation: the rules for `answer`, after a thought where the prompt leaves room for one."""
    head = {
        Thought.OPEN: "start: thought SPACE answer\n",
        Thought.UNDECIDED: f"start: answer | {json.dumps(THINK_START)} thought SPACE answer\n",
    }.get(thought, "start: answer\n")
    if "thought" in head:
        end = THINK_END.replace("/", r"\/")
        head += f"thought[lazy]: /(?s:.*){end}/\nSPACE: /[ \\n]*/\n"
    return head + answer
