"""A target and a drafter over pools compute what their modules do over per-sequence caches: prefill, trees, commits, plain steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree.caches.pages import PageAllocator
from ddtree.caches.pooled_rows import PREFILL, STEP, TREE, PooledRows, consecutive_rows
from ddtree.caches.pools import PageTable
from ddtree.caches.rows import Rows, Span
from ddtree.doctor.hybrid import TARGET, random_hybrid
from ddtree.models.pooled_dflash import PooledDFlash
from ddtree.models.pooled_target import PooledTarget
from ddtree.tree.draft_tree import DraftTree
from tests.closeness import assert_close
from tests.models import tiny

MAX_ROWS = 48
LENGTHS = (37, 5)  # prompts of two sequences, on both sides of a page and a chunk


def targets():
    yield "qwen3_5", random_hybrid("cpu", torch.float32).target.model
    from ddtree.models.config import ModelConfig
    from ddtree.models.llama import Llama
    from ddtree.models.qwen3 import Qwen3

    base = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    from ddtree.doctor.hybrid import fill

    for architecture, cls in (("LlamaForCausalLM", Llama), ("Qwen3ForCausalLM", Qwen3)):
        model = cls(ModelConfig.from_hf({**base, "architectures": [architecture]}), "cpu", torch.float32)
        fill(model, torch.Generator().manual_seed(1))
        model.finish_loading()
        yield architecture, model.eval()


    from ddtree.models.qwen3_5_moe import Qwen3_5Moe
    from ddtree.models.qwen3_moe import Qwen3Moe

    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    shared = {**TARGET, **experts, "shared_expert_intermediate_size": 20}
    for architecture, cls, config in (
        ("Qwen3MoeForCausalLM", Qwen3Moe, {**base, **experts, "decoder_sparse_step": 1, "mlp_only_layers": []}),
        ("Qwen3_5MoeForCausalLM", Qwen3_5Moe, shared),
    ):
        model = cls(ModelConfig.from_hf({**config, "architectures": [architecture]}), "cpu", torch.float32)
        fill(model, torch.Generator().manual_seed(2))
        model.finish_loading()
        yield architecture, model.eval()


TARGETS = dict(targets())


@pytest.fixture(params=TARGETS, name="pair")
def _pair(request):
    """The model, and the same one over pools."""
    model = TARGETS[request.param]
    table = PageTable(4, 256, "cpu")
    allocator = PageAllocator(64, 64)
    allocator.allocate(1)
    pooled = PooledTarget(model, (0, len(model.layers) - 1), table, 64, MAX_ROWS)
    return model, pooled, allocator


def prompt(length: int) -> torch.Tensor:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(length))


def prefilled(model, pooled, allocator, chunk: int = 16):
    """Caches of two sequences by the modules and, in slots 2 and 0, by the pools; features compared on the way."""
    caches, slots = [], (2, 0)
    for length, slot in zip(LENGTHS, slots, strict=True):
        ids, cache = prompt(length), model.new_cache()
        logits, expected = tiny.feed(model, cache, ids, feature_layers=pooled.feature_layers)
        pooled.pool.table.give(slot, allocator.allocate(4))
        features = torch.full((length, pooled.feature_width), torch.nan)
        for start in range(0, length, chunk):
            part = ids[start : start + chunk]
            rows = consecutive_rows(
                PREFILL, part[None], torch.tensor([slot], dtype=torch.int32), pooled.pool.table.context_lengths
            )
            hidden = pooled(rows, features[start:])
            pooled.pool.table.context_lengths[slot] += len(part)
        assert_close("features", features, expected, 1e-4)
        assert_close("logits", pooled.logits(hidden[-1]), logits[-1], 1e-4)
        caches.append(cache)
    return caches, torch.tensor(slots, dtype=torch.int32)


def tree_rows(trees, slots, lengths, each: int) -> PooledRows:
    """Trees packed with NaN-free padding between them, as the device packs them."""
    count = len(trees)
    ids = torch.zeros(count, each, dtype=torch.int64)
    columns = torch.zeros(4, count, each, dtype=torch.int32)
    columns[1], columns[2] = -1, -1
    mask = torch.zeros(count, each, each, dtype=torch.uint8)
    for index, tree in enumerate(trees):
        n = tree.num_nodes
        ids[index, :n] = torch.from_numpy(tree.token_ids)
        columns[0, index, :n] = lengths[index] + torch.from_numpy(tree.depths)
        columns[1, index, :n] = slots[index]
        columns[2, index, :n] = torch.from_numpy(tree.parents)
        mask[index, :n, :n] = torch.from_numpy(tree.ancestor_mask())
    return PooledRows(
        TREE,
        ids.flatten(),
        columns[0].flatten(),
        torch.arange(0, count * each + 1, each, dtype=torch.int32),
        slots,
        columns[1].flatten(),
        torch.arange(each, dtype=torch.int32).repeat(count),
        columns[2].flatten(),
        mask.flatten(0, 1),
        each,
    )


@torch.inference_mode()
def test_rounds_of_trees_and_steps_equal_the_modules(pair):
    model, pooled, allocator = pair
    caches, slots = prefilled(model, pooled, allocator)
    lengths = list(LENGTHS)
    for seed in range(4):
        trees = [random_tree(count, seed) for count in (17, 9)]
        rows = tree_rows(trees, slots, lengths, 20)
        features = torch.full((MAX_ROWS, pooled.feature_width), torch.nan)
        hidden = pooled(rows, features)
        paths = torch.zeros(2, 8, dtype=torch.int32)
        path_lengths = torch.zeros(2, dtype=torch.int32)
        for index, (tree, cache) in enumerate(zip(trees, caches, strict=True)):
            expected = run_tree(model, cache, tree, pooled.feature_layers)
            own = slice(index * 20, index * 20 + tree.num_nodes)
            assert_close("hidden", hidden[own], expected.hidden, 1e-4)
            assert_close("features", features[own], expected.features, 1e-4)
            path = tiny.path_to(tree.num_nodes - 1, tree.parents.tolist())[:8]
            cache.commit(torch.tensor(path))
            paths[index, : len(path)] = torch.tensor(path)
            path_lengths[index] = len(path)
            lengths[index] += len(path)
        pooled.pool.commit(slots, rows.starts, paths, path_lengths)
        pooled.pool.table.context_lengths.index_add_(0, slots.long(), path_lengths)
        # One plain token each: permanent at once.
        root = torch.tensor([[0], [7]])
        hidden = pooled(consecutive_rows(STEP, root, slots, pooled.pool.table.context_lengths))
        for index, cache in enumerate(caches):
            expected = tiny.run(model, cache, root[index])
            cache.commit(torch.tensor([0]))
            assert_close("step", hidden[index], expected.hidden[0], 1e-4)
            lengths[index] += 1
        pooled.pool.table.context_lengths.index_add_(0, slots.long(), torch.ones(2, dtype=torch.int32))
    assert pooled.pool.table.context_lengths.tolist() == [lengths[1], 0, lengths[0], 0]


def random_tree(num_nodes: int, seed: int) -> DraftTree:
    """Token id 0 among its tokens."""
    parents = np.array(tiny.random_parents(num_nodes, seed), dtype=np.int32)
    depths = np.zeros(num_nodes, dtype=np.int32)
    for node in range(1, num_nodes):
        depths[node] = depths[parents[node]] + 1
    return DraftTree(np.arange(num_nodes, dtype=np.int64), parents, depths, np.zeros(num_nodes, dtype=np.float32))


def run_tree(model, cache, tree, feature_layers):
    start = cache.context_length
    span = Span(cache, 0, tree.num_nodes, torch.from_numpy(tree.ancestor_mask()), torch.from_numpy(tree.parents.astype(np.int64)))
    positions = start + torch.from_numpy(tree.depths.astype(np.int64))
    return model(Rows(torch.from_numpy(tree.token_ids), positions, (span,)), feature_layers)


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 8])
def test_a_drafter_over_pools_drafts_the_same_block(window):
    engine = random_hybrid("cpu", torch.float32)
    drafter, target = engine.drafter.model, engine.target.model
    if window:
        object.__setattr__(drafter.config, "layer_types", ("sliding_attention", "full_attention"))
        object.__setattr__(drafter.config, "sliding_window", window)
    table, allocator = PageTable(3, 256, "cpu"), PageAllocator(64, 64)
    allocator.allocate(1)
    pooled = PooledDFlash(drafter, target, table, 64)
    slots, roots = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 5])
    features = torch.randn(2, 20, drafter.fc.in_features)
    caches = [drafter.new_cache(), drafter.new_cache()]
    for slot in slots.tolist():
        table.give(slot, allocator.allocate(2))
    for lengths in ((20, 3), (1, 6)):
        for index, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
            table.context_lengths[slot] += length
            drafter.absorb(features[index, :length], caches[index])
        # What lies beyond a path's end must not matter.
        given = features.clone()
        for index, length in enumerate(lengths):
            given[index, length:] = torch.nan
        pooled.absorb(given, slots, torch.tensor(lengths, dtype=torch.int32))
        num_slots = drafter.config.block_size
        expected = drafter.logits(drafter(drafter.embed_block(roots, target, num_slots), caches)[:, 1:], target)
        assert_close("logits", pooled.draft(roots, slots, num_slots)[1], expected, 1e-4)
    assert pooled.pool.key_pages.isfinite().all(), "the null page must stay finite"
