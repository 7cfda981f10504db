"""SGLang's grammars, asked along a path, are left as they were."""

from types import SimpleNamespace

import numpy as np
import torch

from ddtree.sglang.grammar import SglangGrammar

VOCAB, END = 40, 39


class CountToThree:
    """A grammar as SGLang's: tokens 1, 2, 3 in order, then the end; once terminated it takes tokens in silence."""

    def __init__(self):
        self.taken = []

    def accept_token(self, token):
        if self.is_terminated():
            return
        assert token == self.wanted(), f"Tokens not accepted: {token}"
        self.taken.append(token)

    def wanted(self):
        return len(self.taken) + 1 if len(self.taken) < 3 else END

    def rollback(self, count):
        assert 0 < count <= len(self.taken)
        del self.taken[-count:]

    def is_terminated(self):
        return self.taken[-1:] == [END]

    def allocate_vocab_mask(self, vocab_size, batch_size, device):
        return torch.full((batch_size, -(-vocab_size // 32)), -1, dtype=torch.int32)

    def fill_vocab_mask(self, mask, row):
        bits = np.zeros(mask.shape[1] * 32, dtype=bool)
        bits[self.wanted()] = True
        mask[row] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())


def allowed(grammar, path):
    bits = grammar.allowed_after(path)
    return None if bits is None else np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB]).tolist()


def test_a_path_is_followed_and_taken_back():
    req = SimpleNamespace(grammar=CountToThree())
    grammar = SglangGrammar(req, VOCAB)
    assert allowed(grammar, []) == [1] and allowed(grammar, [1, 2]) == [3] and allowed(grammar, [1, 2, 3]) == [END]
    assert req.grammar.taken == []


def test_past_its_end_all_may_follow_and_no_more_is_taken_back_than_was_taken():
    req = SimpleNamespace(grammar=CountToThree())
    req.grammar.taken = [1]
    grammar = SglangGrammar(req, VOCAB)
    assert allowed(grammar, [2, 3, END]) is None and allowed(grammar, [2, 3, END, 7, 8]) is None
    assert req.grammar.taken == [1] and allowed(grammar, [2]) == [3]
