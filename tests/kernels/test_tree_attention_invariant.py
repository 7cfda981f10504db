"""Batch-invariant attention: lineages, the twin against the usual attention, the kernel against the twin, and a row's bits
in a tree, in a chunk and alone."""

from __future__ import annotations

import pytest
import torch

from ddtree.kernels.lineage import lineage_pooled, lineage_pooled_reference
from ddtree.kernels.tree_attention.invariant import tree_attention_invariant
from ddtree.kernels.tree_attention.invariant_reference import tree_attention_invariant_reference
from ddtree.kernels.tree_attention.pooled_reference import tree_attention_pooled_reference
from tests.closeness import assert_close
from tests.kernels.attention_pools import DEVICE, Pools
from tests.kernels.test_tree_attention_pooled import RATIO

GPU = torch.cuda.is_available()


def lineage_by_kernel(*arguments) -> torch.Tensor:
    pytest.importorskip("triton")
    from ddtree.kernels.lineage.triton import lineage_pooled_triton

    return lineage_pooled_triton(*arguments)


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Forest:
    """`Pools` with what the batch-invariant attention asks for: each tree is `tests.kernels.trees`' own, by its mask."""

    def __init__(self, counts, contexts, *shape, reach=16, page_size=16, **more) -> None:
        self.pools = pools = Pools.random(counts, contexts, *shape, page_size=page_size, reach=reach - 1, **more)
        num_rows = len(pools.query)
        self.row_slots, self.row_indices, parents, positions = (ints([0] * num_rows) for _ in range(4))
        self.row_slots -= 1
        for index, (count, context) in enumerate(zip(counts, contexts, strict=True)):
            start = int(pools.starts[index])
            mask = pools.mask[start : start + count, :count] == 1
            own = slice(start, start + count)
            self.row_slots[own], self.row_indices[own] = pools.slots[index], torch.arange(count, device=DEVICE).int()
            positions[own] = context + mask.sum(1).int() - 1
            for row in range(count):
                ancestors = mask[row, :row].nonzero().flatten()
                parents[start + row] = int(ancestors[-1]) if len(ancestors) else -1
        self.positions, self.parents, self.reach = positions, parents, reach

    def lineage(self, run=lineage_pooled) -> torch.Tensor:
        return run(self.row_slots, self.row_indices, self.parents, self.reach)

    def arguments(self) -> tuple:
        pools = self.pools
        lengths = pools.context_lengths
        indices = (pools.page_table, pools.slots, pools.starts, lengths, self.positions, self.row_slots, self.lineage())
        return (pools.query, pools.key_pages, pools.value_pages, *indices, pools.query.shape[2] ** -0.5, pools.mask.shape[1])


def by_kernel(*arguments, **options) -> torch.Tensor:
    pytest.importorskip("triton")
    from ddtree.kernels.tree_attention.triton_invariant import tree_attention_invariant_triton

    return tree_attention_invariant_triton(*arguments, **options)


@pytest.mark.parametrize("run", [lineage_pooled, lineage_pooled_reference, lineage_by_kernel])
def test_a_lineage_goes_up_to_the_committed_tokens(run):
    row_slots, row_indices = ints([3, 3, 3, -1, 0, 0]), ints([0, 1, 2, 3, 0, 1])
    parents = ints([-1, 0, 0, 7, -1, 0])
    expected = [[-3, -2, -1, 0], [-2, -1, 0, 1], [-2, -1, 0, 2], [0, 0, 0, 0], [-3, -2, -1, 0], [-2, -1, 0, 1]]
    assert run(row_slots, row_indices, parents, 4).tolist() == expected
    consecutive = [[-3, -2, -1, 0], [-2, -1, 0, 1], [-1, 0, 1, 2], [0, 0, 0, 0], [-3, -2, -1, 0], [-2, -1, 0, 1]]
    assert run(row_slots, row_indices, None, 4).tolist() == consecutive


def test_a_lineage_reaches_somewhere():
    with pytest.raises(ValueError, match="reach must be >= 1, got 0"):
        lineage_pooled(ints([0]), ints([0]), None, 0)


@pytest.mark.parametrize("inside", [0, 2])
def test_the_twin_attends_as_the_usual_one_does(inside):
    forest = Forest([9, 3, 1, 30], [17, 40, 0, 31], 6, 2, 24, torch.float32, inside=inside)
    found = tree_attention_invariant_reference(*forest.arguments())
    expected = tree_attention_pooled_reference(*forest.pools.arguments(True))
    assert_close("attended", found[: forest.pools.num_rows], expected[: forest.pools.num_rows], 2e-6)
    assert not found[forest.pools.num_rows :].any()


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((4, 2, 24, torch.float32), {}),
        ((4, 2, 24, torch.float32), {"num_splits": 2, "least_keys": 16}),  # doubled once
        ((2, 2, 16, torch.bfloat16), {"num_splits": 2, "least_keys": 16}),
        ((2, 1, 40, torch.float16), {"num_splits": 2, "least_keys": 16}),
    ],
)
def test_the_kernel_attends_as_the_twin_does(shape, splits):
    forest = Forest([5, 0, 1, 7], [70, 40, 0, 20], *shape)
    out = torch.full_like(forest.pools.query, torch.nan)
    found = by_kernel(*forest.arguments(), out=out, **splits)
    assert found is out
    assert_close("attended", found, tree_attention_invariant_reference(*forest.arguments()), RATIO[shape[3]])


def test_a_sibling_reaches_nothing():
    forest = Forest([8], [21], 2, 1, 16, torch.float32)
    pools, before = forest.pools, by_kernel(*forest.arguments()).clone()
    for node in (2, 5):
        keys, values = pools.key_pages.clone(), pools.value_pages.clone()
        page, place = (places[21 + node] for places in pools.places(0))
        keys[page, place] *= 1000
        values[page, place] *= 1000
        query, _, _, *rest = forest.arguments()
        after = by_kernel(query, keys, values, *rest)
        related = pools.mask[:8, node] == 1
        assert torch.equal(after[:8][~related], before[:8][~related])
        assert not torch.equal(after[node], before[node])


@pytest.mark.parametrize(("reach", "message"), [(8, "at least 16, got 8"), (24, "a power of two of at least 16, got 24")])
def test_bad_reaches_are_named(reach, message):
    forest = Forest([2], [3], 2, 1, 16, torch.float32, reach=16)
    forest.reach = reach
    with pytest.raises(ValueError, match=message):
        tree_attention_invariant(*forest.arguments())


class Text:
    """One text of consecutive tokens, all of them in pages: keys, values and queries of every position."""

    def __init__(self, length, heads, kv_heads, head_dim, dtype, page_size=64) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        num_pages = -(-length // page_size)
        make = {"generator": generator, "device": DEVICE}
        self.pages = [torch.randn(num_pages + 1, page_size, kv_heads, head_dim, **make).to(dtype) for _ in range(2)]
        self.table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))[None].to(DEVICE, torch.int32)
        self.query, self.scale = torch.randn(length, heads, head_dim, **make).to(dtype), head_dim**-0.5

    def chunk(self, first: int, count: int) -> torch.Tensor:
        """Positions `first` to `first + count - 1` as a chunk of consecutive rows behind the others."""
        row_slots, indices = ints([0] * count), ints(range(count))
        lineage = lineage_pooled(row_slots, indices, None, 16)
        given = (ints([0]), ints([0, count]), ints([first]), first + indices, row_slots, lineage)
        return tree_attention_invariant(self.query[first : first + count], *self.pages, self.table, *given, self.scale, count)

    def scattered(self, committed: int, count: int) -> torch.Tensor:
        """The same positions as a path through a tree of many: their keys lie at every third staged place, others between."""
        pages = [each.clone() for each in self.pages]
        flat = self.table[0].long().repeat_interleave(64) * 64 + torch.arange(64, device=DEVICE).repeat(self.table.shape[1])
        for each in pages:
            rows = each.flatten(0, 1)
            path = rows[flat[committed : committed + count]].clone()
            rows[flat[committed : committed + 3 * count]] = torch.randn_like(rows[flat[committed : committed + 3 * count]])
            rows[flat[committed : committed + 3 * count : 3]] = path
        number = 3 * count
        query = torch.randn(number, *self.query.shape[1:], device=DEVICE).to(self.query.dtype)
        query[::3] = self.query[committed : committed + count]
        # Every third node continues the path; two siblings hang at each.
        parents = ints([3 * (node // 3) - 3 if node % 3 == 0 and node else (-1 if not node else 3 * (node // 3)) for node in range(number)])
        depths = ints([node // 3 + (node % 3 > 0) for node in range(number)])
        row_slots, indices = ints([0] * number), ints(range(number))
        lineage = lineage_pooled(row_slots, indices, parents, 16)
        given = (ints([0]), ints([0, number]), ints([committed]), committed + depths, row_slots, lineage)
        return tree_attention_invariant(query, *pages, self.table, *given, self.scale, number)[::3]


@pytest.mark.parametrize("committed", [3, 100])
def test_twins_of_a_tree_a_chunk_and_a_step_agree_to_the_bit(committed):
    text = Text(200, 4, 2, 16, torch.float32)
    alone = torch.cat([text.chunk(position, 1) for position in range(committed, committed + 14)])
    assert torch.equal(text.chunk(committed, 14), alone)
    assert torch.equal(text.scattered(committed, 14), alone)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((24, 4, 256), torch.bfloat16), ((32, 8, 128), torch.bfloat16), ((9, 3, 64), torch.bfloat16), ((9, 3, 64), torch.float32)],
)
def test_a_row_has_the_same_bits_in_a_tree_a_chunk_and_alone_on_a_gpu(shape, dtype):
    """At contexts on both sides of a tile's, a page's and a doubled split's end."""
    text = Text(6_000, *shape, dtype)
    for committed in (0, 5, 63, 64, 700, 2_060, 4_100):
        alone = torch.cat([text.chunk(position, 1) for position in range(committed, committed + 14)])
        assert torch.equal(text.scattered(committed, 14), alone), f"a tree behind {committed}"
        for count in (14, 64, 65, 512, 1_025):
            assert torch.equal(text.chunk(committed, count)[:14], alone), f"a chunk of {count} behind {committed}"
    whole = text.chunk(0, 6_000)
    for first, count in ((1_000, 3), (4_090, 40), (5_000, 700)):
        assert torch.equal(text.chunk(first, count), whole[first : first + count])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(24, 4, 256), (32, 8, 128), (9, 3, 64)])
def test_a_sequence_has_the_same_bits_beside_others_on_a_gpu(shape):
    forest = Forest([65, 1, 40, 65], [1_000, 37, 5_000, 64], *shape, torch.bfloat16, page_size=64)
    query, keys, values, table, slots, starts, lengths, positions, row_slots, lineage, scale, max_rows = forest.arguments()
    together = tree_attention_invariant(*forest.arguments())
    assert_close("attended", together, tree_attention_invariant_reference(*forest.arguments()), RATIO[torch.bfloat16])
    for index in range(4):
        own = slice(int(starts[index]), int(starts[index + 1]))
        alone = (slots[index : index + 1], ints([0, own.stop - own.start]), lengths, positions[own], row_slots[own], lineage[own])
        found = tree_attention_invariant(query[own], keys, values, table, *alone, scale, own.stop - own.start)
        assert torch.equal(found, together[own]), f"sequence {index}"
