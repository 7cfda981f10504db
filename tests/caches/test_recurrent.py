"""RecurrentCache: whatever was staged beside it, the state is that of the committed tokens alone."""

import pytest
import torch

from ddtree.caches.kv import KVCache
from ddtree.caches.model_cache import ModelCache
from ddtree.caches.recurrent import RecurrentCache
from ddtree.kernels.causal_conv import causal_conv_prefill_reference
from ddtree.kernels.gated_delta import gated_delta_prefill_reference
from tests.kernels.trees import ancestor_mask, leaf_paths, random_parents, worst_error

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 8, 6, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
EXACT, CLOSE = 1e-12, 1e-5
NOTHING = torch.empty(0, dtype=torch.int64)


class Layer:
    """What a Gated-DeltaNet layer does with its cache, and the same from scratch by the twins."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.weight = torch.randn(CHANNELS, WIDTH, dtype=dtype)

    def new_cache(self) -> RecurrentCache:
        return RecurrentCache(
            VALUE_HEADS, KEY_DIM, VALUE_DIM, CHANNELS, WIDTH, self.dtype, "cpu", state_dtype=self.dtype
        )

    def tokens(self, count: int) -> list[torch.Tensor]:
        """What each token brings: the conv's input [n, C], g and beta [n, Hv]."""
        shape = (count, VALUE_HEADS)
        x = torch.randn(count, CHANNELS, dtype=self.dtype)
        return [x, -0.3 * torch.rand(shape, dtype=self.dtype), torch.rand(shape, dtype=self.dtype)]

    def split(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        keys = KEY_HEADS * KEY_DIM
        query, key, value = mixed.split((keys, keys, VALUE_HEADS * VALUE_DIM), dim=1)
        dims = (KEY_DIM, KEY_DIM, VALUE_DIM)
        return [part.view(len(mixed), -1, dim) for part, dim in zip((query, key, value), dims, strict=True)]

    def stage(self, cache: RecurrentCache, tokens: list[torch.Tensor], parents=None) -> torch.Tensor:
        x, g, beta = tokens
        mask = None if parents is None else ancestor_mask(parents)
        mixed = cache.stage_conv(x, self.weight, None, parents)
        return cache.stage(*self.split(mixed), g, beta, mask)

    def replay(self, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Out, conv state and recurrent state of `tokens` alone, from nothing, in fp64."""
        x, g, beta = (tensor.double() for tensor in tokens)
        conv_state = torch.zeros(WIDTH - 1, CHANNELS, dtype=torch.float64)
        mixed, conv_state = causal_conv_prefill_reference(x, self.weight.double(), None, conv_state)
        state = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
        out, state = gated_delta_prefill_reference(*self.split(mixed), g, beta, state)
        return out, conv_state, state


def pick(tokens: list[torch.Tensor], rows) -> list[torch.Tensor]:
    return [tensor[rows] for tensor in tokens]


def join(pieces: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(tensors) for tensors in zip(*pieces, strict=True)]


def assert_holds(cache: RecurrentCache, layer: Layer, committed: list[torch.Tensor], limit: float) -> None:
    _, conv_state, state = layer.replay(committed)
    assert cache.context_length == len(committed[0])
    assert torch.equal(cache.conv_state.double(), conv_state)
    assert worst_error(cache.recurrent_state, state, dims=2) <= limit


@pytest.mark.parametrize("chunks", [(130,), (1, 129), (63, 67), (64, 66), (65, 65), (2, 1, 1, 126)])
def test_prefill_in_any_chunks_equals_replaying(chunks):
    layer = Layer()
    cache, tokens = layer.new_cache(), layer.tokens(130)
    expected, _, _ = layer.replay(tokens)
    outs, start = [], 0
    for length in chunks:
        outs.append(layer.stage(cache, pick(tokens, slice(start, start + length))))
        cache.commit(torch.arange(length))
        start += length
    assert worst_error(torch.cat(outs), expected) <= EXACT
    assert_holds(cache, layer, tokens, EXACT)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, EXACT), (torch.float32, CLOSE)])
def test_rounds_of_trees_plain_steps_and_aborts_equal_replaying_their_paths(dtype, limit):
    layer = Layer(dtype)
    cache = layer.new_cache()
    committed = [layer.tokens(7)]
    layer.stage(cache, committed[0])
    cache.commit(torch.arange(7))
    for round_ in range(24):
        num_rows = (17, 1, 65)[round_ % 3]
        parents = random_parents(num_rows, 8, seed=round_)
        nodes = layer.tokens(num_rows)
        out = layer.stage(cache, nodes, parents)
        paths = leaf_paths(parents)
        path = paths[round_ % len(paths)]
        path = path[: 1 + round_ % len(path)]
        expected, _, _ = layer.replay(join([*committed, pick(nodes, path)]))
        assert worst_error(out[path], expected[-len(path) :]) <= limit
        if round_ % 5 == 4:
            cache.commit(NOTHING)
            continue
        cache.commit(path)
        committed.append(pick(nodes, path))
        assert_holds(cache, layer, join(committed), limit)


@pytest.mark.parametrize("length", [1, 2, 40, 79, 80])
def test_the_first_tokens_of_a_chunk_can_be_committed(length):
    layer = Layer()
    cache, tokens = layer.new_cache(), layer.tokens(80)
    layer.stage(cache, tokens)
    cache.commit(torch.arange(length))
    assert_holds(cache, layer, pick(tokens, slice(length)), EXACT)


def test_staging_and_aborting_leave_the_states_alone():
    layer = Layer()
    cache, tokens = layer.new_cache(), layer.tokens(5)
    layer.stage(cache, tokens)
    cache.commit(torch.arange(5))
    before = cache.conv_state.clone(), cache.recurrent_state.clone()
    parents = random_parents(17, 8)
    for drop in (True, False):
        layer.stage(cache, layer.tokens(17), parents)
        if drop:
            cache.commit(NOTHING)
        assert torch.equal(cache.conv_state, before[0]) and torch.equal(cache.recurrent_state, before[1])
    assert cache.context_length == 5
    # Staged again without a commit: only the last counts.
    nodes = layer.tokens(3)
    layer.stage(cache, nodes, torch.tensor([-1, 0, 0]))
    cache.commit(torch.tensor([0, 2]))
    assert_holds(cache, layer, join([tokens, pick(nodes, [0, 2])]), EXACT)


def test_a_path_without_its_rows_is_refused():
    layer = Layer()
    cache = layer.new_cache()
    with pytest.raises(AssertionError, match="nothing is staged"):
        cache.commit(torch.arange(1))
    layer.stage(cache, layer.tokens(3))
    # A forward that fails between the two calls must not leave the rows of the one before.
    cache.stage_conv(layer.tokens(3)[0], layer.weight, None, None)
    with pytest.raises(AssertionError, match="nothing is staged"):
        cache.commit(torch.arange(1))
    layer.stage(cache, layer.tokens(3))
    with pytest.raises(AssertionError, match="path of 4 rows"):
        cache.commit(torch.arange(4))


def test_reset_forgets_everything_and_keeps_the_memory():
    layer = Layer()
    cache, tokens = layer.new_cache(), layer.tokens(6)
    num_bytes, places = cache.num_bytes, (cache.conv_state.data_ptr(), cache.recurrent_state.data_ptr())
    assert num_bytes == 8 * ((WIDTH - 1) * CHANNELS + VALUE_HEADS * KEY_DIM * VALUE_DIM)
    layer.stage(cache, layer.tokens(9))
    cache.commit(torch.arange(9))
    cache.reset()
    assert cache.context_length == 0
    layer.stage(cache, tokens)
    cache.commit(torch.arange(6))
    assert_holds(cache, layer, tokens, EXACT)
    assert cache.num_bytes == num_bytes
    assert (cache.conv_state.data_ptr(), cache.recurrent_state.data_ptr()) == places


def test_a_cache_used_in_inference_mode_can_be_used_outside():
    layer = Layer()
    cache, tokens = layer.new_cache(), layer.tokens(4)
    with torch.inference_mode():
        layer.stage(cache, pick(tokens, slice(3)))
        cache.commit(torch.arange(3))
        layer.stage(cache, pick(tokens, slice(3, 4)))
    cache.commit(torch.arange(1))
    assert_holds(cache, layer, tokens, EXACT)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device():
    cache = RecurrentCache(VALUE_HEADS, KEY_DIM, VALUE_DIM, CHANNELS, WIDTH, torch.float32, "cuda")
    layer = Layer(torch.float32)
    weight, parents = layer.weight.cuda(), random_parents(17, 8)
    mask, path = ancestor_mask(parents).cuda(), leaf_paths(parents)[0].cuda()
    x, g, beta = (tensor.cuda() for tensor in layer.tokens(17))
    parents = parents.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for up, seen, committed in ((parents, mask, path), (None, None, torch.arange(17, device="cuda"))):
            mixed = cache.stage_conv(x, weight, None, up)
            cache.stage(*layer.split(mixed), g, beta, seen)
            cache.commit(committed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_both_kinds_of_layer_commit_together():
    layer = Layer()
    recurrent, kv = layer.new_cache(), KVCache(1, 2, torch.float64, "cpu")
    cache = ModelCache([recurrent, kv])
    nodes, rows = layer.tokens(4), torch.randn(4, 1, 2, dtype=torch.float64)
    layer.stage(recurrent, nodes, torch.tensor([-1, 0, 0, 2]))
    kv.stage(rows, rows)
    path = torch.tensor([0, 2, 3])
    cache.commit(path)
    assert cache.context_length == recurrent.context_length == kv.context_length == 3
    assert cache.num_bytes == recurrent.num_bytes + kv.num_bytes
    assert_holds(recurrent, layer, pick(nodes, path), EXACT)
