"""Pieces concatenate to what transformers decodes from all the ids, for every kind of vocabulary."""

import random

import pytest

from ddtree.text.detokenize import Detokenizer
from tests.text.samples import TEXTS

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def pieces(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


def reference(tokenizer, ids, skip=True):
    return tokenizer.pretrained.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [False, True])
def test_text_comes_back_as_transformers_decodes_it(any_tokenizer, text, special):
    ids = any_tokenizer.encode(text, add_special_tokens=special)
    assert "".join(pieces(any_tokenizer, ids)) == reference(any_tokenizer, ids)
    shown = "".join(pieces(any_tokenizer, ids, skip_special_tokens=False))
    assert shown == reference(any_tokenizer, ids, skip=False)


@pytest.mark.parametrize("seed", range(20))
def test_random_ids_concatenate_exactly(any_tokenizer, seed):
    rng = random.Random(seed)
    ids = [rng.randrange(any_tokenizer.vocab_size + 3) for _ in range(rng.randrange(1, 120))]
    for skip in (True, False):
        joined = "".join(pieces(any_tokenizer, ids, skip_special_tokens=skip))
        assert joined == reference(any_tokenizer, ids, skip)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_concatenate_exactly(any_tokenizer, seed):
    """Ids of single bytes only: mostly invalid UTF-8, with true characters between."""
    rng = random.Random(seed)
    vocabulary = any_tokenizer.vocabulary
    singles = [i for i in range(any_tokenizer.vocab_size) if len(vocabulary.token_bytes(i)) == 1]
    high = [i for i in singles if vocabulary.token_bytes(i)[0] >= 0x80] or singles
    ids = [rng.choice(high if rng.random() < 0.9 else singles) for _ in range(80)]
    assert "".join(pieces(any_tokenizer, ids)) == reference(any_tokenizer, ids)


def test_what_was_given_out_never_changes(any_tokenizer):
    """Every prefix of the ids: given-out text is a prefix of the text of any longer run."""
    ids = any_tokenizer.encode("".join(TEXTS), add_special_tokens=False)
    whole = reference(any_tokenizer, ids)
    detokenizer, given = Detokenizer(any_tokenizer), ""
    for token_id in ids:
        given += detokenizer.feed(token_id)
        assert whole.startswith(given)


def test_split_emoji_waits_and_only_flush_gives_the_replacement(byte_tokenizer):
    vocabulary = byte_tokenizer.vocabulary
    single = {vocabulary.token_bytes(i): i for i in range(byte_tokenizer.vocab_size)}
    ids = [single[bytes([byte])] for byte in "a🫠".encode()]
    assert pieces(byte_tokenizer, ids) == ["a", "", "", "", "🫠", ""]
    assert pieces(byte_tokenizer, ids[:3]) == ["a", "", "", REPLACEMENT]


def test_special_tokens_are_skipped_by_id_and_never_by_look(byte_tokenizer):
    plain = [byte_tokenizer.backend.token_to_id(char) for char in "<|im_end|>"]
    special = byte_tokenizer.backend.token_to_id("<|im_end|>")
    assert "".join(pieces(byte_tokenizer, [special, *plain, special])) == "<|im_end|>"
    think = byte_tokenizer.backend.token_to_id("<think>")
    assert "".join(pieces(byte_tokenizer, [think])) == "<think>"


def test_a_special_token_does_not_eat_the_next_leading_space(any_tokenizer):
    special = min(any_tokenizer.special_ids)
    ids = any_tokenizer.encode("The dog", add_special_tokens=False)
    ids = [ids[0], special, special, *ids[1:]]
    assert "".join(pieces(any_tokenizer, ids)) == reference(any_tokenizer, ids)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2(smollm2, text):
    ids = smollm2.encode(text, add_special_tokens=False)
    assert "".join(pieces(smollm2, ids)) == reference(smollm2, ids)


@pytest.mark.parametrize("seed", range(10))
def test_smollm2_random_ids(smollm2, seed):
    rng = random.Random(seed)
    ids = [rng.randrange(smollm2.vocab_size) for _ in range(400)]
    assert "".join(pieces(smollm2, ids)) == reference(smollm2, ids)
