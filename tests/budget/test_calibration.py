"""Calibrated probabilities come to mean what they say, on simulated acceptance."""

import numpy as np
import pytest

from ddtree.budget.calibration import Calibration, Offset, logit

DEPTHS, WIDTH = 4, 6


def drafted(rng) -> np.ndarray:
    """`[DEPTHS, WIDTH]` log-probabilities, best first, a little mass left out."""
    raw = np.sort(rng.normal(size=(DEPTHS, WIDTH + 2)) * 2.0, axis=1)[:, ::-1]
    raw = raw - np.log(np.exp(raw).sum(1, keepdims=True))
    return raw[:, :WIDTH].astype(np.float32)


def truth(log_probs: np.ndarray, sharpness, shift) -> np.ndarray:
    scores = np.array(sharpness)[:, None] * logit(log_probs) + np.array(shift)[:, None]
    given = 1 / (1 + np.exp(-scores))
    return given / np.maximum(given.sum(1, keepdims=True), 1)


def play(calibration, offset, rng, rounds, sharpness, shift) -> None:
    """Rounds whose target token at each depth falls on the candidates with the true probabilities."""
    for _ in range(rounds):
        log_probs = drafted(rng)
        given = truth(log_probs, sharpness, shift)
        hits = [int(np.searchsorted(np.cumsum(row), rng.random())) for row in given]
        count = next((d + 1 for d, hit in enumerate(hits) if hit != 0), DEPTHS)  # only the best is ever followed
        hits = np.array([hit if hit < WIDTH else -1 for hit in hits])[:count]
        seen = calibration.evidence(log_probs[:count], hits, offset.value)
        calibration.learn(seen)
        offset.learn(seen)


@pytest.mark.parametrize(("sharpness", "shift"), [(1.0, 0.0), (0.5, -0.5), (1.4, 0.3), (0.8, -2.0)])
def test_it_converges(sharpness, shift):
    rng = np.random.default_rng(0)
    calibration, offset = Calibration(DEPTHS), Offset()
    laws = ([sharpness] * DEPTHS, [shift] * DEPTHS)
    play(calibration, offset, rng, 1500, *laws)
    errors, before = [], []
    for _ in range(200):
        log_probs = drafted(rng)
        true = truth(log_probs, *laws)[:2]  # the first depths are those that were seen most
        errors.append(np.exp(calibration.reliability(log_probs, offset.value))[:2] - true)
        before.append(np.exp(log_probs)[:2] - true)
    assert np.abs(np.mean(errors, axis=(0, 1))).max() < 0.04
    assert np.abs(errors).mean() < max(0.5 * np.abs(before).mean(), 0.03)


def test_depths_are_told_apart():
    rng = np.random.default_rng(1)
    calibration, offset = Calibration(DEPTHS), Offset()
    play(calibration, offset, rng, 2000, [1.0, 1.0, 1.0, 1.0], [0.0, -3.0, 0.0, 0.0])
    row = np.log(np.full((DEPTHS, 1), 0.5, np.float32))
    first, second = np.exp(calibration.reliability(row, offset.value))[:2, 0]
    assert first > 0.4 and second < 0.2


@pytest.mark.parametrize("wrong", [True, False])
def test_a_request_is_believed_or_not_within_a_few_rounds(wrong):
    calibration, offset = Calibration(DEPTHS), Offset()
    log_probs = np.log(np.tile(np.array([0.7, 0.1, 0.05], np.float32), (DEPTHS, 1)))
    for _ in range(8):
        hits = np.array([-1]) if wrong else np.zeros(DEPTHS, np.int64)
        seen = calibration.evidence(log_probs[: len(hits)], hits, offset.value)
        calibration.learn(seen)
        offset.learn(seen)
    best = float(np.exp(calibration.reliability(log_probs, offset.value))[0, 0])
    assert best < 0.25 if wrong else best > 0.8


def test_rows_stay_best_first_and_below_certainty():
    rng = np.random.default_rng(2)
    calibration = Calibration(DEPTHS)
    calibration.weights[:] = [0.3, 2.0]
    log_probs = drafted(rng)
    log_probs[0, -1] = -np.inf  # a token that the ranking excludes
    log_probs[1] = [0.0, *[-np.inf] * (WIDTH - 1)]  # a drafter that is sure
    found = calibration.reliability(log_probs, offset=3.0)
    assert (np.diff(np.where(np.isfinite(found), found, -1e9), axis=1) <= 0).all()
    assert (np.exp(found).sum(1) <= 1 + 1e-5).all() and (found <= 0).all()
    assert found[0, -1] == -np.inf and (found[1, 1:] == -np.inf).all()
