"""Stops forged in the middle of an answer, and the counts of a finished request: what an engine says against its tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ddtree.engine.request import RequestStats
from ddtree.text import TextWatcher

REACH = 2  # characters of a forged stop string on each side of a token's beginning


class StopWatcher:
    """A TokenWatcher that ends the answer at a token, as one that reads text does at the token completing a stop string."""

    def __init__(self, stop_id: int) -> None:
        self.stop_id = stop_id

    def feed(self, token_id: int) -> str | None:
        return "stop" if token_id == self.stop_id else None


def stop_string_fault(
    tokenizer, plain: Sequence[int], hidden_ids: Collection[int], generate: Callable[[TextWatcher], list[int] | None]
) -> str | None:
    """A stop string across two tokens of the plain answer, through the text room's own watcher: the answer must end with the
    token that completes it and read as the plain text up to it. None also where the answer is too short to tell."""
    if not hasattr(tokenizer, "vocabulary"):
        return None  # ids without text
    whole = reader(tokenizer, plain, hidden_ids)
    offsets = whole.token_offsets
    at = offsets[len(offsets) // 2] if offsets else 0
    piece = whole.text[max(at - REACH, 0) : at + REACH]
    if len(piece) < 2 * REACH or not piece.strip() or "\ufffd" in piece:
        return None
    place = whole.text.index(piece)
    due = next(n for n in range(1, len(plain) + 1) if piece in reader(tokenizer, plain[:n], hidden_ids).text)
    watcher = TextWatcher(tokenizer, [piece], hidden_ids)
    tokens = generate(watcher)
    if tokens is None:
        return None
    watcher.finish()
    differs = list(tokens[:due]) != list(plain[: min(due, len(tokens))])
    if differs:
        # Wrong before any stop: whatever made it so is found elsewhere. Of stops only its own text can tell.
        due = next((n for n in range(1, len(tokens) + 1) if piece in reader(tokenizer, tokens[:n], hidden_ids).text), len(tokens))
    if len(tokens) != due:
        return (
            f"stop: the stop string {piece!r} is complete with answer token {due - 1}, the answer has {len(tokens)} tokens; "
            f"{'the target alone would have stopped there' if len(tokens) > due else 'nothing stops it so early'}"
        )
    if not differs and watcher.text != whole.text[:place]:
        return f"stop: the text before {piece!r} reads …{watcher.text[-30:]!r}, plain decoding's …{whole.text[:place][-30:]!r}"
    return None


def reader(tokenizer, tokens: Sequence[int], hidden_ids: Collection[int]) -> TextWatcher:
    """A watcher that has read all of `tokens`."""
    watcher = TextWatcher(tokenizer, hidden_ids=hidden_ids)
    for token_id in tokens:
        watcher.feed(token_id)
    watcher.finish()
    return watcher


def count_fault(stats: RequestStats, num_tokens: int) -> str | None:
    """`output_tokens` = number of ids = 1 + sum of length x rounds - trimmed; rounds = those of the histogram."""
    emitted = sum(length * count for length, count in stats.acceptance_histogram.items())
    if stats.output_tokens != num_tokens:
        return f"counts: output_tokens is {stats.output_tokens}, {num_tokens} tokens were emitted"
    if num_tokens and num_tokens != 1 + emitted - stats.trimmed_tokens:
        return f"counts: {num_tokens} tokens, but 1 + {emitted} in the histogram - {stats.trimmed_tokens} trimmed"
    rounds = sum(stats.acceptance_histogram.values())
    if rounds != stats.decode_rounds:
        return f"counts: {stats.decode_rounds} rounds, {rounds} in the histogram"
    return None
