"""Threads: one for a small model, what there was for a larger one, the user's own choice untouched."""

import pytest
import torch

from ddtree.engine import loading


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(loading, "_threads_before", 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_small_then_large():
    loading.settle_threads(6_000_000)
    assert torch.get_num_threads() == 1
    loading.settle_threads(135_000_000)
    assert torch.get_num_threads() == 3


def test_a_number_that_was_set_stays_for_a_large_model():
    torch.set_num_threads(2)
    loading.settle_threads(135_000_000)
    assert torch.get_num_threads() == 2


def test_the_users_own_number_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    loading.settle_threads(6_000_000)
    assert torch.get_num_threads() == 3
