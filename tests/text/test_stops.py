"""Stop strings: the same cut however the text arrives, and nothing held back without need."""

import random

import pytest

from ddtree.text.stops import StopStrings
from tests.text.samples import cut


def run(stops, parts):
    """(text given out with the flush, stop)"""
    watch, given = StopStrings(stops), ""
    for part in parts:
        safe, found = watch.feed(part)
        given += safe
        if found is not None:
            return given, found
    return given + watch.flush(), None


def brute(stops, text):
    """Read one character at a time; the first one that completes a stop string ends it, the longest wins."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_gives_the_brute_force_answer(seed):
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab\n", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
    text = "".join(rng.choices("ab\nc", k=40))
    expected = brute(stops, text)
    for size in (1, 2, 3, 7, len(text)):
        assert run(stops, cut(text, size)) == expected


@pytest.mark.parametrize("seed", range(30))
def test_holds_back_exactly_the_longest_proper_prefix(seed):
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(2, 6))) for _ in range(3)]
    watch, read, given = StopStrings(stops), "", ""
    for char in rng.choices("abc", k=40):
        read += char
        safe, found = watch.feed(char)
        given += safe
        if found:
            return
        prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
        longest = max((p for p in prefixes if read.endswith(p)), key=len)
        assert read == given + longest


def test_what_comes_after_a_match_in_the_same_piece_is_dropped():
    watch = StopStrings(["END"])
    assert watch.feed("oneENDtwo") == ("one", "END")
    assert watch.feed("three") == ("", "END")
    assert watch.flush() == ""


def test_completed_first_wins_and_the_longest_of_a_tie():
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["cd", "abcd"], ["xabcd"]) == ("x", "abcd")


def test_a_false_start_inside_a_stop_string_is_found():
    assert run(["aab"], cut("aaab", 1)) == ("a", "aab")
    assert run(["\n\nQ"], cut("A\n\n\nQ", 1)) == ("A\n", "\n\nQ")


def test_without_stops_nothing_waits():
    assert StopStrings([]).feed("anything") == ("anything", None)


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])


def test_unarmed_matches_are_plain_text():
    watch = StopStrings(["ab"])
    assert watch.feed("xab", armed=False) == ("xab", None)
    assert watch.feed("yab") == ("y", "ab")
