"""transformers along an answer: the same as its own generation, in one forward."""

import pytest
import torch

from ddtree.audit.reference import Reference
from tests.models.tiny import reference


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(2)
    return Reference(reference("Llama"), ())


def test_along_is_generation_up_to_the_first_difference(theirs):
    prompt = [5, 6, 7]
    whole = theirs(prompt, 12)
    assert theirs.along(prompt, whole, 12) == whole
    wrong = [*whole[:4], (whole[4] + 1) % 8, *whole[5:]]
    assert theirs.along(prompt, wrong, 12) == whole[:5]
    assert theirs.along(prompt, whole[:6], 12) == whole[:7]  # ended without a stop


def test_along_ends_at_a_stop(theirs):
    prompt = [5, 6, 7]
    whole = theirs(prompt, 12)
    stop = whole[5]
    stopping = Reference(theirs.model, {stop})
    expected = whole[: whole.index(stop) + 1]
    assert stopping(prompt, 12) == expected
    assert stopping.along(prompt, expected, 12) == expected
    assert stopping.along(prompt, whole, 12) == expected  # went past it
