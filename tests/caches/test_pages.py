"""Pages go to one holder at a time unless shared, come back at once, and nothing grows."""

import contextlib

import numpy as np
import pytest

from ddtree.caches.pages import OutOfPages, PageAllocator


def test_no_page_is_given_twice_and_all_come_back():
    pages = PageAllocator(10, 16)
    first, second = pages.allocate(4), pages.allocate(6)
    assert sorted(first + second) == list(range(10)) and pages.num_free == 0
    with pytest.raises(OutOfPages, match="1 pages of 16 tokens wanted, 0 of 10 are free"):
        pages.allocate(1)
    pages.release(first)
    assert pages.num_free == 4 and sorted(pages.allocate(4)) == sorted(first)


def test_an_allocation_that_does_not_fit_takes_nothing():
    pages = PageAllocator(3, 8)
    with pytest.raises(MemoryError):
        pages.allocate(4)
    assert pages.num_free == 3 and pages.allocate(0) == []


def test_a_shared_page_is_free_when_its_last_holder_lets_go():
    pages = PageAllocator(2, 8)
    mine = pages.allocate(1)
    pages.retain(mine)
    pages.release(mine)
    assert pages.num_free == 1
    pages.release(mine)
    assert pages.num_free == 2


@pytest.mark.parametrize("wrong", [[5], [-1], [0, 0]])
def test_letting_go_of_what_is_not_held_is_an_error(wrong):
    pages = PageAllocator(5, 8)
    pages.allocate(1)
    with pytest.raises(ValueError, match="page"):
        pages.release(wrong)
    with pytest.raises(ValueError, match="page 3 is not held"):
        pages.retain([3])


def test_months_of_traffic_leave_it_as_it_was():
    pages, rng, held = PageAllocator(64, 16), np.random.default_rng(0), []
    for _ in range(3_000):
        if held and rng.random() < 0.5:
            pages.release(held.pop(rng.integers(len(held))))
        else:
            with contextlib.suppress(OutOfPages):
                held.append(pages.allocate(int(rng.integers(8))))
        given = [page for each in held for page in each]
        assert len(given) == len(set(given)) == 64 - pages.num_free
    for each in held:
        pages.release(each)
    assert pages.num_free == 64 and len(pages._free) == 64


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens, count):
    assert PageAllocator(4, 16).pages_for(tokens) == count
