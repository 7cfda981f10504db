"""What is trained is what is served: the packed forward against `DFlash.absorb` and `forward`, block by block."""

from __future__ import annotations

import pytest
import torch

from ddtree.training.blocks import build_blocks
from ddtree.training.packed import PackedDrafter, new_drafter
from ddtree.training.sample import GENERATED


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("block_size", [6, 4])
def test_packed_blocks_equal_single_served_blocks(target, training_config, attention, block_size):
    drafter = new_drafter(target, training_config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    tokens = torch.randint(0, 61, (2, 40))
    classes = torch.full((2, 40), GENERATED, dtype=torch.uint8)
    anchors = torch.tensor([[1, 9, 30, 38], [4, 5, 6, 20]])
    blocks = build_blocks(tokens, classes, anchors, block_size, 32, training_config.mask_token_id, 0.3)
    features = target.features(tokens, training_config.target_layer_ids)
    with torch.no_grad():  # flex attention has no backward on the CPU
        hidden = PackedDrafter(drafter, target, attention)(features, blocks)
    for sequence in range(2):
        for index, anchor in enumerate(anchors[sequence].tolist()):
            cache = drafter.new_cache()
            drafter.absorb(features[sequence, :anchor], cache)
            served = drafter(drafter.embed_block(tokens[sequence, anchor : anchor + 1], target, block_size), [cache])
            rows = hidden[sequence, index * block_size : (index + 1) * block_size]
            torch.testing.assert_close(rows, served[0], rtol=1e-4, atol=1e-5)


def test_a_fresh_drafter_ends_in_the_targets_norm_and_is_reproducible(target, training_config):
    first, second = new_drafter(target, training_config), new_drafter(target, training_config)
    assert torch.equal(first.norm.weight, target.final_norm)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
