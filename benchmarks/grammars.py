"""Grammar libraries side by side: time to compile a new schema, to make one token mask, to walk one node and back.

llguidance comes with ddtree; xgrammar is measured where it is installed (`pip install xgrammar`; not a dependency). Two
vocabularies: SmolLM2's own 49,152 tokens, and 248,320 of which the rest are pairs of those, as a larger BPE would have
merged them. Masks are made after every token of one document. The last line is JSON.

    python -m benchmarks.grammars
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from ddtree.sources import resolve
from ddtree.text import Tokenizer

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 40}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", "größe"]},
        "address": ADDRESS,
        "scores": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 8},
    },
    "required": ["name", "age", "kind", "address", "scores"],
    "additionalProperties": False,
}
DOCUMENT = json.dumps(
    {
        "name": "Zoë 😀 of the long and winding road",
        "age": 42,
        "kind": "größe",
        "address": {"street": "Hauptstraße 5", "zip": "12345"},
        "scores": [1.5, -2000.0, 7],
    },
    ensure_ascii=False,
)


def vocabulary(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """The tokenizer's tokens, filled up to `size` with pairs of them."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    generator, seen = random.Random(0), set(tokens)
    while len(tokens) < size:
        pair = tokens[generator.randrange(300, 49000)] + tokens[generator.randrange(300, 20000)].lstrip()
        if pair not in seen and len(pair) < 24:
            seen.add(pair)
            tokens.append(pair)
    return tokens


class Llguidance:
    """llguidance's matcher."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]):
        from llguidance import LLTokenizer, TokenizerWrapper

        self.tokens, self.special_token_ids = tokens, sorted(tokenizer.special_ids)
        self.eos_token_id, self.bos_token_id = min(tokenizer.eos_token_ids), None
        self._encode = tokenizer.encode
        self._words = LLTokenizer(TokenizerWrapper(self), n_vocab=len(tokens), eos_token=[self.eos_token_id])
        self._mask = np.zeros((len(tokens) + 31) // 32, dtype=np.int32)

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode(errors="replace"), add_special_tokens=False)

    def compile(self) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(self._words, LLMatcher.grammar_from_json_schema(SCHEMA))

    def mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def take(self, token_id: int) -> bool:
        return self._matcher.consume_token(token_id)

    def back(self) -> None:
        self._matcher.rollback(1)


class Xgrammar:
    """xgrammar's matcher, compiled on one thread."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]):
        import xgrammar

        self._library = xgrammar
        self._info = xgrammar.TokenizerInfo(
            tokens,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=len(tokens),
            stop_token_ids=[min(tokenizer.eos_token_ids)],
        )
        self._mask = xgrammar.allocate_token_bitmask(1, len(tokens))

    def compile(self) -> None:
        compiler = self._library.GrammarCompiler(self._info, max_threads=1)
        self._matcher = self._library.GrammarMatcher(compiler.compile_json_schema(SCHEMA, any_whitespace=True))

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)

    def take(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def back(self) -> None:
        self._matcher.rollback(1)


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(library: type, tokenizer: Tokenizer, tokens: list[bytes]) -> dict:
    """One row of figures."""
    made: list = []
    row = {"library": library.__name__.lower(), "vocab": len(tokens)}
    row["tokenizer_s"] = round(timed(lambda: made.append(library(tokenizer, tokens))), 3)
    subject = made[0]
    row["compile_ms"] = round(statistics.median(timed(subject.compile) for _ in range(3)) * 1e3, 2)
    masks = []
    token_ids = tokenizer.encode(DOCUMENT, add_special_tokens=False)
    for token_id in token_ids:
        masks.append(timed(subject.mask) * 1e6)
        if not subject.take(token_id):
            raise SystemExit(f"{row['library']} refuses token {token_id} of a document that the schema allows")
    row |= {"mask_us_mean": round(statistics.mean(masks), 1), "mask_us_median": round(statistics.median(masks), 1)}

    def walk() -> None:
        for _ in range(1000):
            subject.take(token_ids[0])
            subject.back()

    subject.compile()
    row["node_us"] = round(timed(walk) * 1e3, 2)
    return row


def main() -> None:
    tokenizer = Tokenizer.load(resolve("smollm2").target)
    rows = []
    for size in (49_152, 248_320):
        tokens = vocabulary(tokenizer, size)
        for library in (Llguidance, Xgrammar):
            try:
                rows.append(measure(library, tokenizer, tokens))
            except ImportError:
                print(f"{library.__name__} is not installed: left out")
                continue
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
