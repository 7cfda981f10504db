"""What a round costs: a verify against its rows, a draft against its slots, and the rest; measured, then kept up to date.

Rows are the nodes of one forward, roots included, of all sequences; slots are a drafter's block rows, of all sequences.
Only ratios decide which tree pays, and a busy machine slows everything alike: so what the clocks say first moves one common
scale, and only what differs from it moves the shape of a curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

SCALE_RATE = 0.15  # how far one round moves the common scale
SHAPE_RATE = 0.02  # and the knots around its own counts, at least
MEASURED_WEIGHT = 16  # rounds that a measurement at start-up counts for
MOVES_PER_TABLE = 8  # a move shifts little, and a table takes as long as a good part of a decision
MOST_SURPRISE = 0.7  # in log seconds; a hiccup says no more than this


class Curve:
    """Seconds over a count: measured knots, straight between them, the last slope beyond, never falling.

    With `buckets` a count costs what the next bucket costs, since that is what runs.
    """

    def __init__(self, knots: Mapping[int, float], buckets: tuple[int, ...] = (), weight: float = MEASURED_WEIGHT):
        if not knots or not all(math.isfinite(s) and s > 0 for s in knots.values()) or min(knots) < 1:
            raise ValueError(f"a cost curve needs counts >= 1 and seconds > 0, got {dict(knots)}")
        self.counts = np.array(sorted(knots), dtype=np.int64)
        self.seconds = np.array([knots[int(count)] for count in self.counts], dtype=np.float64)
        self.buckets = np.array(sorted(buckets), dtype=np.int64)
        self._weights = np.full(len(self.counts), float(weight))
        self._table = np.empty(0)
        self._num_moves = 0  # since it was made

    def upto(self, count: int) -> np.ndarray:
        """`[count + 1]` seconds, by count; entry 0 is 0. Not to be written to."""
        if len(self._table) <= count or self._num_moves >= MOVES_PER_TABLE:
            self._table = self._tabulate(max(count, len(self._table) - 1))
            self._num_moves = 0
        return self._table[: count + 1]

    def at(self, count: int) -> float:
        return float(self.upto(count)[count])

    def observe(self, count: int, log_ratio: float) -> None:
        """Move the knots around `count` a little toward `exp(log_ratio)` times what they say."""
        if not 1 <= count <= self.counts[-1]:
            return
        upper = int(np.searchsorted(self.counts, count))
        lower = max(upper - 1, 0)
        width = self.counts[upper] - self.counts[lower]
        share = 1.0 if not width else (count - self.counts[lower]) / width
        self._move(upper, share, log_ratio)
        if width:
            self._move(lower, 1 - share, log_ratio)
        self._num_moves += 1

    def _move(self, knot: int, share: float, log_ratio: float) -> None:
        """The running mean of what was measured and seen, later of what was seen lately."""
        self._weights[knot] += share
        self.seconds[knot] *= math.exp(max(SHAPE_RATE, 1 / self._weights[knot]) * share * log_ratio)

    def as_json(self) -> dict[str, float]:
        return {str(count): seconds for count, seconds in zip(self.counts.tolist(), self.seconds.tolist(), strict=True)}

    def _tabulate(self, count: int) -> np.ndarray:
        counts = np.arange(count + 1)
        if len(self.buckets):
            place = np.searchsorted(self.buckets, counts).clip(max=len(self.buckets) - 1)
            counts = np.maximum(self.buckets[place], counts)
        # What costs less with more rows was noise: the lesser count may as well be padded.
        rising = np.minimum.accumulate(self.seconds[::-1])[::-1]
        table = np.interp(counts, self.counts, rising)
        beyond = counts > self.counts[-1]
        if len(self.counts) > 1:
            slope = (rising[-1] - rising[-2]) / (self.counts[-1] - self.counts[-2])
            table[beyond] += slope * (counts[beyond] - self.counts[-1])
        table[0] = 0.0
        return table


class CostModel:
    """Seconds of a round and of its parts. `plain_rest_s` and `draft_rest_s`: what is neither draft nor verify in a round
    that does not draft, and in one that does."""

    def __init__(self, verify: Curve, draft: Curve, plain_rest_s: float, draft_rest_s: float):
        self.verify, self.draft = verify, draft
        self.plain_rest_s, self.draft_rest_s = plain_rest_s, max(draft_rest_s, plain_rest_s)
        self.log_scale = 0.0  # of now against when it was measured

    def plain_s(self, num_sequences: int = 1) -> float:
        """A round in which nobody drafts, at the measured scale."""
        return self.verify.at(num_sequences) + self.plain_rest_s

    def round_s(self, num_rows: int, num_slots: int) -> float:
        """A round that drafts `num_slots` and verifies `num_rows`, at the measured scale; plain without slots."""
        if not num_slots:
            return self.plain_s(num_rows)
        return self.verify.at(num_rows) + self.draft.at(num_slots) + self.draft_rest_s

    @property
    def scale(self) -> float:
        """Seconds now per second then."""
        return math.exp(self.log_scale)

    def observe(self, num_rows: int, verify_s: float, num_slots: int = 0, draft_s: float = 0.0) -> None:
        """Take in what the stage clocks said of one round."""
        if verify_s <= 0:
            return
        surprise = self._surprise(verify_s, self.verify.at(num_rows))
        self.log_scale += SCALE_RATE * surprise
        self.verify.observe(num_rows, surprise)
        if num_slots and draft_s > 0:
            self.draft.observe(num_slots, self._surprise(draft_s, self.draft.at(num_slots)))

    def _surprise(self, measured_s: float, modelled_s: float) -> float:
        surprise = math.log(measured_s / modelled_s) - self.log_scale
        return min(max(surprise, -MOST_SURPRISE), MOST_SURPRISE)

    def as_json(self) -> dict:
        return {
            "verify_s": self.verify.as_json(),
            "draft_s": self.draft.as_json(),
            "plain_rest_s": self.plain_rest_s,
            "draft_rest_s": self.draft_rest_s,
            "row_buckets": self.verify.buckets.tolist(),
        }

    @classmethod
    def from_json(cls, read: dict) -> CostModel:
        """Raises ValueError where `read` is not what `as_json` gives."""
        try:
            verify, draft = (
                {int(count): float(seconds) for count, seconds in read[name].items()} for name in ("verify_s", "draft_s")
            )
            rests = [float(read[name]) for name in ("plain_rest_s", "draft_rest_s")]
            buckets = tuple(int(bucket) for bucket in read["row_buckets"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a cost model: {type(error).__name__} {error}") from None
        if not all(math.isfinite(rest) and rest >= 0 for rest in rests):
            raise ValueError(f"rest of a round must be >= 0 seconds, got {rests}")
        return cls(Curve(verify, buckets), Curve(draft), *rests)
