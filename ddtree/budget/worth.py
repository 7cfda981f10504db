"""Does speculation pay for this request? What its rounds brought and cost beyond plain ones, and when to try again.

A request falls to plain decoding when its speculative rounds, the recent ones counting most, bring less than the time they
take would bring by plain decoding. It then tries one round now and again, at intervals that keep the price of trying at
most PROBE_SHARE of the time, and comes back when one shows that it would pay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 0.9  # what a round keeps of the evidence before it
PROBE_MEMORY = 0.6  # what a probe keeps: the text may have changed since
WARM_WEIGHT = 3.0  # rounds that the engine's experience counts for in a new request
TOLERATED = 0.015  # loss against plain decoding that is not worth falling for: a few bad rounds look like it
PROBE_SHARE = 0.015
WAITS = (2, 400)  # rounds between probes, least and most at first
MOST_DOUBLINGS = 2


@dataclass(frozen=True)
class Experience:
    """Means over speculative rounds: tokens beyond the plain round's one, seconds beyond the plain round's own."""

    extra_tokens: float
    extra_s: float

    def mixed(self, new: Experience, share: float) -> Experience:
        """The running mean after one more round."""
        return Experience(
            self.extra_tokens + share * (new.extra_tokens - self.extra_tokens),
            self.extra_s + share * (new.extra_s - self.extra_s),
        )

    def lucky(self, tokens: float) -> Experience:
        """With more tokens than were expected, or fewer."""
        return Experience(self.extra_tokens + tokens, self.extra_s)


class Worth:
    """Ask `speculates` before each round, then `book` it if it drafted, `skip` if not."""

    def __init__(self, before: Experience, weight: float = WARM_WEIGHT, memory: float = MEMORY):
        self.memory = memory
        self.extra_tokens, self.extra_s, self.weight = weight * before.extra_tokens, weight * before.extra_s, weight
        self.speculating = True
        self.num_plain = 0  # rounds since the last one that drafted
        self.wait = 0  # between probes; 0 until the first fall

    @property
    def mean(self) -> Experience:
        return Experience(self.extra_tokens / self.weight, self.extra_s / self.weight)

    def speculates(self, price: float) -> bool:
        """Whether to draft in the next round; `price` in tokens per second of the time."""
        if self.speculating and not self.wait and not self._pays(price):
            self._fall(price)  # what the engine knows says no from the start
        return self.speculating or self.num_plain >= self.wait

    @property
    def probing(self) -> bool:
        """Whether a round that drafts now is a probe."""
        return not self.speculating

    def skip(self) -> None:
        self.num_plain += 1

    def book(self, brought: Experience, price: float) -> None:
        """One round that drafted."""
        memory = PROBE_MEMORY if self.probing else self.memory
        self.extra_tokens = memory * self.extra_tokens + brought.extra_tokens
        self.extra_s = memory * self.extra_s + brought.extra_s
        self.weight = memory * self.weight + 1.0
        self.num_plain = 0
        pays = self._pays(price)
        if self.speculating and not pays:
            self._fall(price)
        elif self.probing and pays:
            self.speculating = True
        elif self.probing:
            self.wait = min(2 * self.wait, self._first_wait(price) * 2**MOST_DOUBLINGS)

    def _pays(self, price: float) -> bool:
        tokens, plain_tokens = self.weight + self.extra_tokens, self.weight + price * self.extra_s
        return tokens >= (1 - TOLERATED) * plain_tokens

    def _fall(self, price: float) -> None:
        self.speculating, self.num_plain = False, 0
        self.wait = self._first_wait(price)

    def _first_wait(self, price: float) -> int:
        """Rounds after which one more probe has cost PROBE_SHARE of them."""
        mean = self.mean
        loss = max(price * mean.extra_s - mean.extra_tokens, 0.0)
        return min(max(math.ceil(loss / PROBE_SHARE), WAITS[0]), WAITS[1])
