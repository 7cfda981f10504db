"""The server over the real engine and scripted actors: 13 tokens that read as letters, whole and streamed."""

from __future__ import annotations

from dataclasses import replace

from ddtree.server.batch import Facts
from tests.scripted import EOS, VOCAB, scripted_engine
from tests.server import fakes
from tests.server.fakes import ByteTokenizer, serving

# A token of two characters and one of white space, so that tokens and characters are not the same.
TEXTS = [b"a", b"b", b"c", b"d", b"e", b"fg", b" ", b"</s>", b"h", b"i", b"\xc3", b"\xa9", b"j"]
DRAFTERS = {
    "right": {"skill": 1.0},
    "wrong": {"skill": 0.0},
    "EOS everywhere": {"skill": 0.5, "eos_everywhere": True},
    "some": {"skill": 0.6},
}
BUDGETS = [0, 1, 16, 64, 1024]
ROOMY = replace(fakes.FACTS, max_context=4096)  # tools make long prompts
FACTS = Facts(max_context=512, vocab_size=VOCAB, default_tree_budget=16, block_size=8)


class LetterTokenizer(ByteTokenizer):
    """Ids 0 to 12, EOS among them; every character encodes to some id."""

    special_ids = frozenset({EOS})
    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB

    def token_bytes(self, token_id):
        return TEXTS[token_id]

    def encode(self, text, add_special_tokens=True):
        return [ord(char) % VOCAB for char in text]

    def decode(self, token_ids, skip_special_tokens=True):
        skipped = self.special_ids if skip_special_tokens else ()
        return b"".join(TEXTS[t] for t in token_ids if t not in skipped).decode(errors="replace")


def scripted_server(drafter: str, **options):
    """A client of the app over a real worker and engine, with the drafter of that name."""
    engine = scripted_engine(**DRAFTERS[drafter], max_running=8)
    engine.gate = None
    return serving(engine, facts=FACTS, tokenizer=LetterTokenizer(), **options)


def byte_server(drafter: str, **options):
    """The same over bytes, so that the target can write JSON; its law is as wild, so only a grammar makes it."""
    room = {"max_running": 8, "max_context": ROOMY.max_context}
    engine = scripted_engine(**DRAFTERS[drafter], **room, vocab_size=fakes.VOCAB, eos=fakes.EOS)
    engine.gate = None
    return serving(engine, facts=ROOMY, **options)
