"""Anchors, blocks and masks against loops that say the rule."""

from __future__ import annotations

import torch

from ddtree.training.blocks import block_sparse_mask, build_blocks, choose_anchors, dense_mask, gamma
from ddtree.training.sample import FORCED, GENERATED, USER_TOKEN


def naive_mask(anchors: list[int], block_size: int, num_rows: int, length: int) -> torch.Tensor:
    """`[R, T + R]` bool: a row sees the tokens before its anchor and its own block; padding sees itself."""
    mask = torch.zeros(num_rows, length + num_rows, dtype=torch.bool)
    for row in range(num_rows):
        block = row // block_size
        if block >= len(anchors):
            mask[row, length + row] = True
            continue
        for position in range(anchors[block]):
            mask[row, position] = True
        for slot in range(block_size):
            mask[row, length + block * block_size + slot] = True
    return mask


def example(length=30, block_size=5, num_rows=23):
    tokens = torch.randint(5, 60, (2, length))
    tokens[0, 12] = 0
    classes = torch.full((2, length), GENERATED, dtype=torch.uint8)
    classes[:, :6], classes[0, 20:24] = FORCED, USER_TOKEN
    anchors = torch.tensor([[5, 12, 18, 27], [6, 7, 8, 28]])
    return tokens, classes, anchors, build_blocks(tokens, classes, anchors, block_size, num_rows, 4, 0.3)


def test_dense_mask_equals_the_naive_one():
    _, _, anchors, blocks = example()
    mask = dense_mask(blocks, 30)
    assert mask.shape == (2, 1, 23, 53)
    for row in range(2):
        assert torch.equal(mask[row, 0], naive_mask(anchors[row].tolist(), 5, 23, 30))


def test_block_sparse_mask_equals_the_dense_one():
    _, _, _, blocks = example()
    sparse, dense = block_sparse_mask(blocks, 30), dense_mask(blocks, 30)
    query, key = torch.meshgrid(torch.arange(23), torch.arange(53), indexing="ij")
    for sequence in range(2):
        assert torch.equal(sparse.mask_mod(torch.tensor(sequence), torch.tensor(0), query, key), dense[sequence, 0])


def test_blocks_hold_root_masks_labels_and_weights():
    tokens, classes, anchors, blocks = example()
    for sequence in range(2):
        for index, anchor in enumerate(anchors[sequence].tolist()):
            for slot in range(5):
                row, position = index * 5 + slot, anchor + slot
                assert blocks.positions[sequence, row] == position and blocks.limits[sequence, row] == anchor
                assert blocks.token_ids[sequence, row] == (tokens[sequence, anchor] if slot == 0 else 4)
                if slot == 0 or position >= 30:
                    assert blocks.weights[sequence, row] == 0
                    continue
                assert blocks.labels[sequence, row] == tokens[sequence, position]
                share = {FORCED: 0.0, GENERATED: 1.0, USER_TOKEN: 0.3}[int(classes[sequence, position])]
                expected = share * torch.exp(torch.tensor(-(slot - 1) / gamma(5)))
                torch.testing.assert_close(blocks.weights[sequence, row], expected, rtol=1e-5, atol=1e-7)
    assert (blocks.weights[:, 20:] == 0).all()


def test_anchors_precede_generated_tokens_and_ascend():
    classes = torch.zeros(3, 40, dtype=torch.uint8)
    classes[:, 10:30], classes[:, 30:35] = GENERATED, USER_TOKEN
    anchors = choose_anchors(classes, 15, 0.0)
    assert (anchors.diff(dim=1) > 0).all()
    assert ((anchors >= 9) & (anchors <= 28)).all()


def test_decay_is_the_papers():
    assert (gamma(8), gamma(10), gamma(16)) == (4, 5, 7)
