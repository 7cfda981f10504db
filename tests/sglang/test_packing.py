"""Trees as SGLang's verify takes them: masks, links and positions, against what the words mean."""

import numpy as np
import pytest
import torch

from ddtree.models.dflash import DFlash
from ddtree.models.drafter_config import DrafterConfig
from ddtree.sglang.slots import SlotContext, SlotPool
from ddtree.sglang.trees import first_children_and_siblings, moves, pack
from ddtree.tree.build import Candidates, build_ddtree
from ddtree.tree.draft_tree import DraftTree

DRAFTER = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "vocab_size": 31,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 30, "target_layer_ids": [0, 1]},
}


def some_tree(seed, budget=9):
    generator = np.random.default_rng(seed)
    log_probs = np.log(generator.dirichlet(np.ones(6), 4)).astype(np.float32)
    ids = np.stack([generator.permutation(20)[:6] for _ in range(4)])
    return build_ddtree(0, Candidates(ids, np.sort(log_probs)[:, ::-1].copy()), budget)


def random_drafter():
    model = DFlash(DrafterConfig.from_hf(DRAFTER)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model


@pytest.mark.parametrize("seed", range(4))
def test_links_walk_to_every_child_in_order(seed):
    tree = some_tree(seed)
    first, sibling = first_children_and_siblings(tree.parents)
    for node in range(tree.num_nodes):
        walked, child = [], first[node]
        while child >= 0:
            walked.append(child)
            child = sibling[child]
        assert walked == tree.children(node).tolist()
    assert sibling[0] == -1


def test_a_row_sees_the_committed_tokens_and_its_ancestors():
    trees, lengths, num_nodes = [some_tree(1), DraftTree.root_only(7)], [3, 5], 12
    packed = pack(trees, lengths, num_nodes)
    masks = np.split(packed.mask, [num_nodes * (3 + num_nodes)])
    for tree, length, mask, positions in zip(trees, lengths, masks, packed.positions, strict=True):
        mask = mask.reshape(num_nodes, length + num_nodes)
        assert mask[:, :length].all()
        inside = mask[: tree.num_nodes, length : length + tree.num_nodes]
        assert (inside == tree.ancestor_mask()).all()
        assert (positions[: tree.num_nodes] == length + tree.depths).all()
        # Padding hangs below the root alone, so no node of the tree sees it and it sees none but the root.
        assert not mask[: tree.num_nodes, length + tree.num_nodes :].any()
        assert (mask[tree.num_nodes :, length:].sum(axis=1) == 2).all() and mask[tree.num_nodes :, length].all()
    assert packed.token_ids.shape == (2, num_nodes) and packed.token_ids[1, 0] == 7


def test_rows_under_scattered_slots_draft_as_a_cache_does():
    model = random_drafter()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(11, model.fc.in_features, generator=generator)
    slots = torch.randperm(40, generator=generator)[:11]
    cache, pool = model.new_cache(), SlotPool(model, 40)
    model.absorb(features, cache)
    pool.absorb(features[:4], torch.arange(4), slots[:4])
    pool.absorb(features[4:], torch.arange(4, 11), slots[4:])
    block = torch.randn(1, 4, model.config.hidden_size, generator=generator)
    drafted = model(block, [SlotContext(pool, slots)])
    assert torch.equal(drafted, model(block, [cache]))


def test_rows_move_to_the_front_in_whatever_order_a_step_copies():
    rng = np.random.default_rng(3)
    for _ in range(200):
        num_nodes = 24
        paths = [np.array([0, *np.sort(rng.choice(np.arange(1, num_nodes), rng.integers(0, 16), replace=False))]) for _ in range(3)]
        rows = np.arange(3 * num_nodes)
        for targets, sources in moves(paths, num_nodes):
            for at in rng.permutation(len(targets)):
                rows[targets[at]] = rows[sources[at]]
        for number, path in enumerate(paths):
            assert rows[number * num_nodes :][: len(path)].tolist() == (path + number * num_nodes).tolist()
