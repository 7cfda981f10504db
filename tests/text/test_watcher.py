"""The watcher: text, stop string and streaming pieces of one generation."""

import pytest

from ddtree.text.watcher import TextWatcher


def run(watcher, ids):
    """(streamed pieces joined, stop string, tokens read)"""
    streamed = ""
    for place, token_id in enumerate(ids, start=1):
        stop = watcher.feed(token_id)
        streamed += watcher.take()
        if stop is not None:
            return streamed + watcher.finish(), stop, place
    return streamed + watcher.finish(), None, len(ids)


def test_streamed_pieces_are_the_text(any_tokenizer):
    ids = any_tokenizer.encode(" The quick 🙂 List<int>", add_special_tokens=False)
    watcher = TextWatcher(any_tokenizer)
    streamed, stop, _ = run(watcher, ids)
    assert stop is None
    assert streamed == watcher.text == any_tokenizer.decode(ids)
    assert watcher.take() == watcher.finish() == ""


def test_the_token_that_completes_a_stop_string_is_the_last(any_tokenizer):
    ids = any_tokenizer.encode("The quick brown fox jumps over", add_special_tokens=False)
    whole = any_tokenizer.decode(ids)
    for stop in ("ck br", "fox", "x", " jumps ov", "Th"):
        watcher = TextWatcher(any_tokenizer, stops=[stop, "absent"])
        text, found, read = run(watcher, ids)
        assert found == watcher.stop_string == stop
        assert text == watcher.text == whole[: whole.index(stop)]
        assert stop in any_tokenizer.decode(ids[:read])
        assert stop not in any_tokenizer.decode(ids[: read - 1])


def test_a_stop_string_inside_a_token_drops_the_rest_of_it(smollm2):
    (token_id,) = smollm2.encode(" something", add_special_tokens=False)
    watcher = TextWatcher(smollm2, stops=["me"])
    assert watcher.feed(token_id) == "me"
    assert watcher.finish() == " so"
    assert watcher.feed(token_id) == "me"
    assert watcher.finish() == ""


def test_hidden_ids_have_no_text(byte_tokenizer):
    ids = byte_tokenizer.encode("fox", add_special_tokens=False)
    hidden = byte_tokenizer.backend.token_to_id("<think>")
    watcher = TextWatcher(byte_tokenizer, stops=["<think>"], hidden_ids={hidden})
    assert run(watcher, [*ids, hidden]) == ("fox", None, len(ids) + 1)


def test_a_held_back_end_comes_with_finish(byte_tokenizer):
    watcher = TextWatcher(byte_tokenizer, stops=["fox!"])
    for token_id in byte_tokenizer.encode("a fox", add_special_tokens=False):
        watcher.feed(token_id)
    assert watcher.take() == "a "
    assert watcher.finish() == "fox"


def test_a_stop_string_of_incomplete_bytes_still_cuts(byte_tokenizer):
    vocabulary = byte_tokenizer.vocabulary
    single = {vocabulary.token_bytes(i): i for i in range(byte_tokenizer.vocab_size)}
    watcher = TextWatcher(byte_tokenizer, stops=["\N{REPLACEMENT CHARACTER}"])
    assert run(watcher, [single[b"a"], single[b"\xf0"]]) == ("a", None, 2)
    assert watcher.stop_string == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("min_tokens, expected", [(0, 2), (2, 2), (3, 4)])
def test_stop_strings_count_from_min_tokens_on(byte_tokenizer, min_tokens, expected):
    vocabulary = byte_tokenizer.vocabulary
    single = {vocabulary.token_bytes(i): i for i in range(byte_tokenizer.vocab_size)}
    watcher = TextWatcher(byte_tokenizer, stops=["ab"], min_tokens=min_tokens)
    _, stop, read = run(watcher, [single[char] for char in (b"a", b"b", b"a", b"b")])
    assert (stop, read) == ("ab", expected)


def test_token_offsets(byte_tokenizer):
    vocabulary = byte_tokenizer.vocabulary
    single = {vocabulary.token_bytes(i): i for i in range(byte_tokenizer.vocab_size)}
    watcher = TextWatcher(byte_tokenizer)
    run(watcher, [single[bytes([byte])] for byte in "a🫠b".encode()])
    assert watcher.token_offsets == [0, 1, 1, 1, 1, 2]


def test_special_tokens_that_are_to_be_shown(byte_tokenizer):
    """Where a tokenizer marks a thought's tags special, the parser must read them all the same."""
    start, end = (byte_tokenizer.backend.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    ids = [start, *byte_tokenizer.encode("a b"), end]
    watcher = TextWatcher(byte_tokenizer, shown_ids={start})
    assert run(watcher, ids)[0] == "<|im_start|>a b"
    assert run(TextWatcher(byte_tokenizer), ids)[0] == "a b"
