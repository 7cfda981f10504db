"""The dense batched target computes what the served packed one does."""

from __future__ import annotations

import pytest
import torch

from ddtree.training.features import DenseTarget
from tests.training.conftest import VOCAB, tiny_target
from tests.training.packed_forward import packed_forward


@pytest.mark.parametrize("qk_norm", [False, True])
def test_dense_forward_equals_the_packed_one(qk_norm):
    model = tiny_target(qk_norm=qk_norm)
    target = DenseTarget(model, torch.float32)
    tokens = torch.randint(0, VOCAB, (3, 23))
    features, hidden = target.forward(tokens, (0, 2, 3))
    for row in range(3):
        packed_features, packed_hidden = packed_forward(model, tokens[row], (0, 2, 3))
        torch.testing.assert_close(features[row], packed_features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(hidden[row], packed_hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(target.logits(hidden[row]), model.logits(packed_hidden), rtol=1e-4, atol=1e-4)


def test_features_alone_equal_those_of_the_whole_forward(target):
    tokens = torch.randint(0, VOCAB, (2, 17))
    torch.testing.assert_close(target.features(tokens, (0, 2)), target.forward(tokens, (0, 2))[0])
