"""Attention over pages and the commit of paths: the twins against the single-sequence reference, the kernels against
the twins; what nobody may read is NaN."""

import pytest
import torch

from ddtree.kernels.tree_attention import commit_pages, tree_attention_pooled, tree_attention_reference
from ddtree.kernels.tree_attention.plan import AttentionPlan, attention_workspace_size
from ddtree.kernels.tree_attention.pooled_reference import (
    commit_pages_reference,
    tree_attention_pooled_reference,
)
from tests.closeness import assert_close
from tests.kernels.attention_pools import DEVICE, Pools

RATIO = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MODES = ("tree", "causal", "block")
ONE_SPLIT, SEVERAL_SPLITS = AttentionPlan(16, 16, 4, 1, 1, 1), AttentionPlan(16, 16, 4, 1, 3, 1)


def by_kernel(*arguments, **options) -> torch.Tensor:
    pytest.importorskip("triton")
    from ddtree.kernels.tree_attention.triton import tree_attention_pooled_triton

    return tree_attention_pooled_triton(*arguments, **options)


def commit_by_kernel(*arguments) -> None:
    pytest.importorskip("triton")
    from ddtree.kernels.tree_attention.commit_triton import commit_pages_triton

    commit_pages_triton(*arguments)


def check_kernel(pools: Pools, mode: str, window=None, plan=None, max_rows=None) -> None:
    arguments = pools.arguments(mode == "tree", max_rows=max_rows)
    options = {"window": window, "bidirectional": mode == "block"}
    expected = tree_attention_pooled_reference(*arguments, **options)
    out = torch.full_like(pools.query, torch.nan)
    actual = by_kernel(*arguments, **options, out=out, plan=plan)
    assert actual is out
    assert_close("attended", out[: pools.num_rows], expected[: pools.num_rows], RATIO[out.dtype])
    assert out[pools.num_rows :].isnan().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, 1, 4, 30])
def test_the_twin_attends_as_the_reference_does(mode, window):
    if mode == "tree" and window is not None:
        pytest.skip("trees have no window")
    pools = Pools.random([5, 0, 1, 9], [17, 40, 0, 31], 6, 2, 24, torch.float32)
    arguments = pools.arguments(mode == "tree")
    actual = tree_attention_pooled(*arguments, window=window, bidirectional=mode == "block")
    for index, (count, context) in enumerate(zip(pools.counts, pools.contexts, strict=True)):
        start = int(pools.starts[index])
        keys, values = (pages[pools.places(index)] for pages in (pools.key_pages, pools.value_pages))
        for row in range(count):
            place = context + row
            seen = range(place + 1) if mode == "causal" else range(context + count)
            if mode == "tree":
                seen = [t for t in seen if t < context or pools.mask[start + row, t - context] == 1]
            seen = [t for t in seen if window is None or abs(t - place) < window]
            query = pools.query[start + row][None]
            # The reference's last key is the row's own; its order does not matter.
            keys_seen, values_seen = keys[seen].transpose(0, 1), values[seen].transpose(0, 1)
            expected = tree_attention_reference(query, keys_seen, values_seen, None, arguments[8])
            assert_close(f"sequence {index}, row {row}", actual[start + row][None], expected, 2e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", [ONE_SPLIT, SEVERAL_SPLITS], ids=["one split", "several splits"])
def test_the_kernel_attends_as_the_twin_does(mode, plan):
    check_kernel(Pools.random([6, 0, 1], [37, 4, 0], 6, 2, 16, torch.float32), mode, plan=plan)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (3, 1), (5, 1), (20, 1)])
def test_heads_of_a_row_see_alike_wherever_a_tile_cuts_it(heads, kv_heads):
    """A tile of 16 pairs begins inside a row, of 64 keys the later 32 are a word of their own, a row has more heads than a tile pairs."""
    pools = Pools.random([36, 0, 3], [40, 5, 64], heads, kv_heads, 16, torch.float32, page_size=64)
    check_kernel(pools, "tree", plan=AttentionPlan(16, 64, 4, 1, 1, 1))


def test_no_tile_has_more_rows_than_are_looked_up_for_it():
    pytest.importorskip("triton")
    from ddtree.kernels.tree_attention.triton import rows_of_tile

    for block_m in (16, 32, 64, 128):
        for group in range(1, 131):
            firsts = range(0, block_m * group, block_m)
            most = max((first + block_m - 1) // group - first // group + 1 for first in firsts)
            window = rows_of_tile(block_m, group)
            assert most <= window <= block_m and window & (window - 1) == 0, (block_m, group)


@pytest.mark.parametrize("mode, window", [("causal", 1), ("causal", 18), ("block", 3), ("block", 20)])
def test_the_kernel_looks_no_further_than_the_window(mode, window):
    plan = ONE_SPLIT if window == 18 else SEVERAL_SPLITS
    check_kernel(Pools.random([5, 1], [45, 0], 2, 1, 16, torch.float32), mode, window, plan)


@pytest.mark.parametrize("mode, window", [("tree", None), ("causal", 18), ("block", None), ("block", 7)])
@pytest.mark.parametrize("plan", [ONE_SPLIT, SEVERAL_SPLITS], ids=["one split", "several splits"])
def test_tokens_may_lie_each_in_a_page_of_its_own(mode, window, plan):
    check_kernel(Pools.random([6, 0, 1], [37, 4, 0], 6, 2, 16, torch.float32, page_size=1), mode, window, plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_awkward_head_dims(dtype):
    check_kernel(Pools.random([5], [19], 3, 1, 24, dtype), "tree", plan=SEVERAL_SPLITS)


def test_the_table_serves_buckets_larger_than_any_tree():
    check_kernel(Pools.random([3], [40], 6, 2, 64, torch.float32, page_size=32, max_rows=8), "tree", max_rows=8)


@pytest.mark.parametrize("plan", [ONE_SPLIT, SEVERAL_SPLITS], ids=["one split", "several splits"])
def test_padding_inside_a_sequence_reaches_nothing_and_comes_out_as_zero(plan):
    pools = Pools.random([3, 5], [30, 0], 2, 1, 16, torch.float32, inside=6)
    check_kernel(pools, "tree", plan=plan)
    attended = tree_attention_pooled_reference(*pools.arguments(True))
    assert attended[:3].isfinite().all() and attended[:3].any()
    assert not attended[3:9].any() and not attended[14:20].any()


def test_a_sibling_reaches_nothing():
    pools = Pools.random([6], [21], 2, 1, 16, torch.float32)
    before = by_kernel(*pools.arguments(True), plan=SEVERAL_SPLITS).clone()
    for node in (2, 5):
        keys, values = pools.key_pages.clone(), pools.value_pages.clone()
        page, place = (places[21 + node] for places in pools.places(0))
        keys[page, place] *= 1000
        values[page, place] *= 1000
        query, _, _, *rest = pools.arguments(True)
        after = by_kernel(query, keys, values, *rest, plan=SEVERAL_SPLITS)
        related = pools.mask[:6, node] == 1
        assert torch.equal(after[:6][~related], before[:6][~related])
        assert not torch.equal(after[node], before[node])


def test_a_workspace_is_used_and_may_be_dirty():
    pools = Pools.random([5], [40], 2, 1, 16, torch.float32)
    arguments = pools.arguments(True)
    size = SEVERAL_SPLITS.workspace_size(*pools.query.shape)
    dirty = torch.full((size,), torch.nan, device=DEVICE)
    actual = by_kernel(*arguments, plan=SEVERAL_SPLITS, workspace=dirty)
    assert torch.equal(actual[:5], by_kernel(*arguments, plan=SEVERAL_SPLITS)[:5])
    assert not dirty.isnan().all()
    with pytest.raises(ValueError, match="workspace has"):
        by_kernel(*arguments, plan=SEVERAL_SPLITS, workspace=dirty[1:])
    assert attention_workspace_size(pools.query, 1, 16, 1, 5) > 0


def paths(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Paths behind whose ends lies garbage, and their lengths."""
    width = max(len(row) for row in rows) + 2
    padded = [row + [10**6] * (width - len(row)) for row in rows]
    return tuple(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (padded, [len(row) for row in rows]))


@pytest.mark.parametrize("commit", [commit_pages, commit_pages_reference, commit_by_kernel])
def test_commit_moves_the_path_to_the_front(commit):
    pools = Pools.random([40, 0, 3, 7], [29, 5, 0, 16], 2, 2, 12, torch.float32)
    # Long enough for two blocks of the kernel; with a stretch that stays, then overlapping moves.
    path, lengths = paths([0, 1, 2, *range(4, 35, 2), 36, 37, 38], [], [0, 2], [0])
    keys, values = (torch.stack((pages, pages + 1)) for pages in (pools.key_pages, pools.value_pages))
    before = [keys.clone(), values.clone()]
    expected = [keys.clone(), values.clone()]
    for index, length in enumerate(lengths.tolist()):
        if length:
            page, place = pools.places(index)
            context = pools.contexts[index]
            old, new = context + path[index, :length].long(), torch.arange(context, context + length, device=DEVICE)
            for now, then in zip(expected, before, strict=True):
                now[:, page[new], place[new]] = then[:, page[old], place[old]]
    commit(keys, values, pools.page_table, pools.slots, pools.context_lengths, path, lengths)
    for actual, wanted in zip((keys, values), expected, strict=True):
        assert torch.equal(actual.nan_to_num(nan=-99.0), wanted.nan_to_num(nan=-99.0))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"window": 0}, "window must be >= 1, got 0"),
        ({"bidirectional": True, "tree": True}, "pass ancestor_mask=None"),
        ({"page_size": 24}, "page size must be 1 or a power of two"),
        ({"kv_heads": 4}, "6 heads, which must be a multiple of the pages' 4"),
        ({"query": torch.float16}, "cast one of them"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    page_size, kv_heads = change.pop("page_size", 16), change.pop("kv_heads", 2)
    query_dtype, tree = change.pop("query", torch.float32), change.pop("tree", False)
    pools = Pools.random([2], [3], 6, kv_heads, 16, torch.float32, page_size=page_size)
    query, *rest = pools.arguments(tree)
    with pytest.raises(ValueError, match=message):
        tree_attention_pooled(query.to(query_dtype), *rest, **change)


@pytest.mark.parametrize("change", [torch.Tensor.bool, lambda mask: mask.t().contiguous().t()])
def test_a_mask_of_another_kind_is_refused(change):
    query, *rest = Pools.random([3], [3], 2, 1, 16, torch.float32).arguments(True)
    rest[6] = change(rest[6])
    with pytest.raises(ValueError, match="ancestor_mask must be uint8"):
        tree_attention_pooled(query, *rest)


TRUE_SHAPES = {"27B": (24, 4, 256), "drafter": (32, 8, 128), "SmolLM2": (9, 3, 64)}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TRUE_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("counts, contexts", [([1], [513]), ([64], [8000]), ([17, 0, 1, 33], [0, 7, 700, 4095]), ([257], [1000])])
@pytest.mark.parametrize("mode", MODES)
def test_true_shapes_on_the_device(shape, dtype, page_size, counts, contexts, mode):
    pools = Pools.random(counts, contexts, *TRUE_SHAPES[shape], dtype, page_size=page_size, reach=20)
    check_kernel(pools, mode)
    if mode == "tree":
        padded = [max(count, 1) for count in counts]  # a padded sequence without a root is the dummy slot's, and finite
        check_kernel(Pools.random(padded, contexts, *TRUE_SHAPES[shape], dtype, page_size=page_size, inside=9), mode)
    else:
        check_kernel(pools, mode, window=600)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TRUE_SHAPES)
@pytest.mark.parametrize("count, context", [(2048, 0), (2048, 3000), (777, 5)])
def test_prompt_chunks_on_the_device(shape, count, context):
    check_kernel(Pools.random([count], [context], *TRUE_SHAPES[shape], torch.bfloat16, page_size=64, max_rows=2048), "causal")
