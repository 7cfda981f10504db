"""How far the drafter can be believed: its probabilities against what the target chose, per depth, learnt as it goes.

A candidate of drafter probability p is the target's token, given that the path before it is, with probability
sigmoid(sharpness * logit(p) + shift + offset). Sharpness and shift belong to the depth and are the engine's, learnt slowly;
the offset belongs to the request, starts at 0, and is learnt within a few rounds. A round tells the truth at every depth that
its path reached and at one more (the bonus token), whatever was verified: so what is learnt does not depend on the budget.

Letters: D depths, M candidates per depth, a observed depths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_LOGIT = 8.0  # nobody is surer than 0.9997
LEARNT_CANDIDATES = 8  # per depth; what lies below says next to nothing
PRIOR_PRECISION = np.array([12.0, 0.0, 2.0])  # of sharpness around 1, between them, of shift around 0
OFFSET_PRECISION = 1.5
DEPTH_MEMORY = 0.999  # what a depth keeps of its evidence per observation
REQUEST_MEMORY = 0.97  # what a request keeps of its own per round
LEAST_WEIGHTS, MOST_WEIGHTS = np.array([0.2, -8.0]), np.array([3.0, 8.0])  # of sharpness, of shift


class Evidence(NamedTuple):
    """What one round showed about a drafter's candidates."""

    logits: np.ndarray  # [a, m] logit of each candidate's drafter probability
    errors: np.ndarray  # [a, m] 1 or 0, it was the target's token or not, minus the probability that was given to it
    spread: np.ndarray  # [a, m] variance of that


class Calibration:
    """The engine's part: sharpness and shift of each depth."""

    def __init__(self, num_depths: int):
        self.weights = np.tile([1.0, 0.0], (num_depths, 1))  # [D, 2]
        self.information = np.zeros((3, num_depths))  # squared logits, logits, ones; each weighted by its variance

    def reliability(self, log_probs: np.ndarray, offset: float = 0.0, depths: np.ndarray | None = None) -> np.ndarray:
        """`[rows, M]` float32 log-probabilities of acceptance given an accepted parent; order within a row is kept.

        Row i is of depth i + 1 below the root, or of `depths[i] + 1`.
        """
        sharpness, shift = self.weights[: len(log_probs)].T if depths is None else self.weights[depths].T
        scores = sharpness[:, None] * logit(log_probs) + (shift[:, None] + offset)
        calibrated = -np.logaddexp(0.0, -scores)
        total = np.exp(calibrated).sum(axis=1, keepdims=True)
        # Candidates exclude each other: together they cannot be more than sure.
        return (calibrated - np.log(np.maximum(total, 1.0))).astype(np.float32)

    def evidence(self, log_probs: np.ndarray, hits: np.ndarray, offset: float) -> Evidence:
        """`log_probs [a, M]` as drafted; `hits [a]`: the rank of the target's token, -1 where it was no candidate."""
        logits = logit(log_probs[:, :LEARNT_CANDIDATES])
        logits = np.where(np.isfinite(logits), logits, -30.0)
        sharpness, shift = self.weights[: len(logits)].T
        given = 1.0 / (1.0 + np.exp(-(sharpness[:, None] * logits + (shift[:, None] + offset))))
        was = np.arange(logits.shape[1]) == hits[:, None]
        return Evidence(logits, was - given, given * (1.0 - given))

    def learn(self, seen: Evidence) -> None:
        """One Newton step per observed depth on the log-likelihood, older evidence fading."""
        count = len(seen.logits)
        slope, level = (seen.errors * seen.logits).sum(1), seen.errors.sum(1)
        weighted = seen.spread * seen.logits
        fisher = np.array([(weighted * seen.logits).sum(1), weighted.sum(1), seen.spread.sum(1)])
        self.information[:, :count] = DEPTH_MEMORY * self.information[:, :count] + fisher
        squared, cross, spread = self.information[:, :count] + PRIOR_PRECISION[:, None]
        # The inverse of [[squared, cross], [cross, spread]], written out: two by two, at every depth at once.
        step = np.array([spread * slope - cross * level, squared * level - cross * slope]) / (squared * spread - cross**2)
        self.weights[:count] = (self.weights[:count] + step.T).clip(LEAST_WEIGHTS, MOST_WEIGHTS)


class Offset:
    """The request's part: one number for all depths, since a text is easy or hard as a whole."""

    def __init__(self):
        self.value = 0.0
        self.information = 0.0

    def learn(self, seen: Evidence) -> None:
        """One Newton step, pulled toward 0 by the prior."""
        self.information = REQUEST_MEMORY * self.information + float(seen.spread.sum())
        gradient = float(seen.errors.sum()) - (1 - REQUEST_MEMORY) * OFFSET_PRECISION * self.value
        value = self.value + gradient / (OFFSET_PRECISION + self.information)
        self.value = min(max(value, LEAST_WEIGHTS[1]), MOST_WEIGHTS[1])


def logit(log_probs: np.ndarray) -> np.ndarray:
    """log p - log(1 - p) in float64, at most MOST_LOGIT; -inf stays."""
    log_probs = np.asarray(log_probs, dtype=np.float64)
    with np.errstate(divide="ignore"):
        return np.minimum(log_probs - np.log(-np.expm1(log_probs)), MOST_LOGIT)
