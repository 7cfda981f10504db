from __future__ import annotations

import pytest

from ddtree.sampling.params import SamplingParams


def test_default_is_greedy_and_unfiltered():
    params = SamplingParams()
    assert params.greedy and not params.filtered
    assert not SamplingParams(top_k=5).filtered  # greedy has nothing to filter
    assert SamplingParams(temperature=1, min_p=0.1).filtered


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), True, "1", None)),
        *(("top_p", value) for value in (0, -0.5, 1.01, float("nan"), True, "1")),
        *(("top_k", value) for value in (-1, 1.5, True, "1", None)),
        *(("min_p", value) for value in (-0.1, 1.1, float("nan"), False)),
    ],
)
def test_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*got"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("params", [{"temperature": 100}, {"top_p": 1e-9}, {"top_k": 10**6}, {"min_p": 1}])
def test_edges_are_accepted(params):
    SamplingParams(**params)
