"""One tolerance for the whole suite, the same on every machine."""

from __future__ import annotations

import numpy as np


def assert_close(name: str, actual, expected, ratio: float) -> None:
    """Fail unless |actual - expected| <= ratio * |expected| in the Euclidean norm, in fp64.

    Arrays or tensors of any device and dtype; shapes must agree. NaN and infinity never pass, on either side.
    Against an expected value of zero the norm of the difference itself must be <= ratio.
    """
    actual, expected = _to_fp64(actual), _to_fp64(expected)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(expected).all(), f"{name}: the expected value is not finite"
    assert np.isfinite(actual).all(), f"{name}: {np.count_nonzero(~np.isfinite(actual))} values are not finite"
    error = np.linalg.norm((actual - expected).ravel())
    scale = np.linalg.norm(expected.ravel()) or 1.0
    assert error <= ratio * scale, f"{name}: relative norm {error / scale:.3e}, allowed {ratio:.1e}"


def _to_fp64(value) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, dtype=np.float64)
