"""KVCache and ModelCache: commit(path) leaves what replaying the path alone would have left."""

import pytest
import torch

from ddtree.caches.kv import KVCache
from ddtree.caches.model_cache import ModelCache

HEADS, DIM = 2, 4
EMPTY = torch.zeros(0, dtype=torch.int64)


def new_cache(capacity=8):
    return KVCache(HEADS, DIM, torch.float32, "cpu", capacity)


def rows(count):
    return torch.randn(count, HEADS, DIM), torch.randn(count, HEADS, DIM)


def contents(cache):
    """Committed keys and values, seen through the next stage."""
    keys, values = cache.stage(*(torch.zeros(1, HEADS, DIM) for _ in range(2)))
    return keys[:, :-1].clone(), values[:, :-1].clone()


def test_stage_returns_committed_then_staged_rows():
    cache = new_cache()
    first, second = rows(3), rows(2)
    cache.stage(*first)
    cache.commit(torch.arange(3))
    for seen, old, new in zip(cache.stage(*second), first, second, strict=True):
        assert torch.equal(seen, torch.cat((old, new)).transpose(0, 1))


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2], [0, 3, 6], [0, 1, 5, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_commit_equals_replaying_the_path(path):
    tree, replayed = new_cache(), new_cache()
    prompt, nodes = rows(4), rows(7)
    path = torch.tensor(path)
    for cache, staged in ((tree, nodes), (replayed, [part[path] for part in nodes])):
        cache.stage(*prompt)
        cache.commit(torch.arange(4))
        cache.stage(*staged)
        cache.commit(path if cache is tree else torch.arange(len(path)))
    assert tree.context_length == replayed.context_length == 4 + len(path)
    for actual, expected in zip(contents(tree), contents(replayed), strict=True):
        assert torch.equal(actual, expected)


def test_many_random_rounds_equal_a_list_of_rows():
    generator = torch.Generator().manual_seed(5)
    cache, expected = new_cache(capacity=1), []
    for _ in range(60):
        count = int(torch.randint(1, 9, (1,), generator=generator))
        keys, values = rows(count)
        cache.stage(keys, values)
        keep = torch.rand(count, generator=generator) < 0.5
        keep[0] = True
        path = keep.nonzero().squeeze(1)
        cache.commit(path)
        expected += [keys[node] for node in path]
    assert cache.context_length == len(expected)
    assert torch.equal(contents(cache)[0], torch.stack(expected, dim=1))


def test_an_aborted_round_leaves_no_trace():
    cache = new_cache()
    kept = rows(2)
    cache.stage(*kept)
    cache.commit(torch.arange(2))
    cache.stage(*rows(5))
    cache.commit(EMPTY)
    assert cache.context_length == 2
    assert torch.equal(contents(cache)[0], kept[0].transpose(0, 1))


def test_staging_again_replaces_what_was_staged():
    cache = new_cache()
    cache.stage(*rows(5))
    second = rows(2)
    cache.stage(*second)
    cache.commit(torch.arange(2))
    assert torch.equal(contents(cache)[1], second[1].transpose(0, 1))
    cache.stage(*rows(1))
    with pytest.raises(AssertionError, match="path of 2 rows, but 1 are staged"):
        cache.commit(torch.arange(2))


def test_capacity_doubles_and_keeps_the_committed_rows():
    cache = new_cache(capacity=4)
    first = rows(4)
    cache.stage(*first)
    cache.commit(torch.arange(4))
    bytes_before = cache.num_bytes
    cache.stage(*rows(13))
    assert cache.capacity == 32 and cache.num_bytes == 8 * bytes_before
    cache.commit(EMPTY)
    assert torch.equal(contents(cache)[0], first[0].transpose(0, 1))


def test_grown_in_inference_mode_it_still_serves_outside():
    cache = new_cache(capacity=1)
    with torch.inference_mode():
        cache.stage(*rows(3))
        cache.commit(torch.arange(3))
    cache.stage(*rows(1))
    cache.commit(torch.arange(1))
    assert cache.context_length == 4


def test_reset_forgets_and_keeps_the_memory():
    cache = new_cache()
    cache.stage(*rows(3))
    cache.commit(torch.arange(3))
    num_bytes = cache.num_bytes
    cache.reset()
    assert cache.context_length == 0 and cache.num_bytes == num_bytes
    fresh = rows(2)
    assert torch.equal(cache.stage(*fresh)[0], fresh[0].transpose(0, 1))


def test_model_cache_commits_every_layer():
    cache = ModelCache([new_cache(), new_cache()])
    nodes = [rows(4), rows(4)]
    for layer, staged in zip(cache.layers, nodes, strict=True):
        layer.stage(*staged)
    cache.commit(torch.tensor([0, 2]))
    assert cache.context_length == 2
    assert cache.num_bytes == 2 * cache.layers[0].num_bytes
    for layer, (keys, _) in zip(cache.layers, nodes, strict=True):
        assert torch.equal(contents(layer)[0], keys[[0, 2]].transpose(0, 1))
    cache.reset()
    assert cache.context_length == 0


@pytest.mark.parametrize("path", [[1], [0, 2, 1], [0, 0]])
def test_model_cache_refuses_what_is_no_path(path):
    cache = ModelCache([new_cache()])
    cache.layers[0].stage(*rows(4))
    with pytest.raises(AssertionError, match="a path starts at the root and ascends"):
        cache.commit(torch.tensor(path))
