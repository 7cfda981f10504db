"""Pages beyond one sequence: states come back bit for bit, rows are held as often as they are named, and no NaN stays behind."""

import pytest
import torch

from ddtree.caches.pages import Holder, OutOfPages, PageAllocator
from ddtree.caches.pools import PAGE_SIZE, AttentionPool, RecurrentPool, RecurrentShape
from ddtree.caches.shared import PageStore, SharedRows, SharedState

NUM_PAGES = 12


@pytest.fixture(params=[torch.float32, torch.bfloat16], name="store")
def _store(request):
    """Pages of a target of 3 layers and a drafter of 2 with other heads."""
    target = AttentionPool(3, NUM_PAGES, 2, 4, request.param, "cpu")
    drafter = AttentionPool(2, NUM_PAGES, 1, 8, request.param, "cpu")
    store = PageStore((target, drafter), PageAllocator(NUM_PAGES - 1, PAGE_SIZE, first_page=1))
    store.pools = (target, drafter)
    return store


@pytest.mark.parametrize("num_bytes", [1, 8, 4099, 80_000])
def test_a_state_comes_back_bit_for_bit_from_any_pages(store, num_bytes):
    store.allocator.release([store.allocator.allocate(3)[1]])  # the free ones are not in order
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    pages = store.keep(data)
    assert len(pages) == store.pages_of(num_bytes) == -(-num_bytes // store.page_bytes)
    others = [page for page in range(NUM_PAGES) if page not in pages]
    assert torch.equal(store.load(pages, num_bytes), data)
    for pool in store.pools:
        assert not pool.key_pages[:, others].any() and not pool.value_pages[:, others].any(), "no page of another's is written"


def test_pages_that_held_a_state_are_finite_before_rows_come_to_lie_in_them(store):
    free = store.allocator.num_free
    pages = store.keep(torch.full((9000,), 255, dtype=torch.uint8))  # NaN as numbers
    state = SharedState(store, store.allocator, tuple(pages), 9000)
    assert any(pool.key_pages.isnan().any() for pool in store.pools)
    lent = state.lent()
    state.release()
    assert torch.equal(lent.load(), torch.full((9000,), 255, dtype=torch.uint8)), "who borrowed it still has it"
    lent.release()
    assert all(pool.key_pages.isfinite().all() and pool.value_pages.isfinite().all() for pool in store.pools)
    assert store.allocator.num_free == free
    with pytest.raises(OutOfPages):
        store.keep(torch.zeros(NUM_PAGES * store.page_bytes, dtype=torch.uint8))
    assert store.allocator.num_free == free


@pytest.mark.parametrize("cut", [1, 27, 28, 91, 92, 93, 155, 156, 199])
def test_parts_of_rows_name_the_pages_that_they_lie_in(store, cut):
    """Rows 100 ... 299 in pages 1 ... 4 of their sequence; a cut inside a page leaves it to both."""
    pages = tuple(store.allocator.allocate(4))
    holder = Holder(store.allocator)
    holder.adopt(pages)
    whole = SharedRows(holder, 100, 200, pages)
    upper, lower = whole.part(0, cut).copied(), whole.part(cut, 200).copied()
    whole.release()
    assert (upper.first, upper.num_rows, lower.first, lower.num_rows) == (100, cut, 100 + cut, 200 - cut)
    for part in (upper, lower):
        places = range(part.first, part.first + part.num_rows)
        assert part.pages == tuple(pages[i - 1] for i in dict.fromkeys(place // PAGE_SIZE for place in places))
        assert part.first_page == part.first // PAGE_SIZE
    shared = set(upper.pages) & set(lower.pages)
    assert len(shared) == ((100 + cut) % PAGE_SIZE > 0)
    assert all(store.allocator.holders[page] == 1 + (page in shared) for page in pages)
    assert holder.num_pages == holder.num_sole == 4
    store.allocator.retain(pages[:1])  # somebody else as well
    assert (holder.num_pages, holder.num_sole) == (4, 3)
    store.allocator.release(pages[:1])
    upper.release()
    lower.release()
    with pytest.raises(ValueError, match="is not held by this holder"):
        lower.release()
    assert store.allocator.num_free == NUM_PAGES - 1


def test_a_page_is_copied_whole(store):
    one, other = store.allocator.allocate(2)
    for pool in store.pools:
        pool.key_pages[:, one].normal_()
        pool.value_pages[:, one].normal_()
    store.copy(one, other)
    for pool in store.pools:
        assert torch.equal(pool.key_pages[:, one], pool.key_pages[:, other])
        assert torch.equal(pool.value_pages[:, one], pool.value_pages[:, other])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slots_states_are_read_and_begun_with_again(dtype):
    shape = RecurrentShape(2, 4, 8, 12, 4, 80, 200)
    pool = RecurrentPool(3, 4, 16, shape, dtype, "cpu")
    pool.states.normal_()
    pool.conv_states.normal_()
    before = [pool.states.clone(), pool.conv_states.clone()]
    state = pool.read(2)
    assert len(state) == pool.state_bytes
    pool.clear(2)
    pool.write(0, state)
    for states, old in zip((pool.states, pool.conv_states), before, strict=True):
        assert torch.equal(states[:, 0], old[:, 2])
        assert torch.equal(states[:, [1, 3]], old[:, [1, 3]])
