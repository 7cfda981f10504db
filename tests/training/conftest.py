"""A tiny random target and sampled data for the training tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree.models.config import ModelConfig
from ddtree.models.llama import Llama
from ddtree.models.rope import RopeConfig
from ddtree.training.config import SamplingConfig, TrainingConfig
from ddtree.training.features import DenseTarget

VOCAB = 61
OPENERS = {
    "system_prefix": [1, 10, 11, 2, 12],
    "after_user": [13, 1, 14],
    "after_assistant": [13, 1, 15],
    "end_id": 2,
    "raw_prefix": [0],
    "stop_ids": [2, 0],
    "docstring_ids": [21, 40, 41, 42, 43],
    "shares": {"chat": 0.7, "raw": 0.3},
    "empty_shares": {"chat": 0.3},
    "openers": {"chat": [[20, 21], [22]], "raw": [[30], [31, 32, 33]]},
}


def tiny_target(seed: int = 0, qk_norm: bool = False) -> Llama:
    """A random target in float32: 4 layers, 2 query heads for each of 2 key heads, width 32."""
    config = ModelConfig(
        architecture="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM",
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8,
        rms_norm_eps=1e-5, max_position_embeddings=256, rope=RopeConfig(theta=10_000.0), tie_word_embeddings=True,
        qk_norm=qk_norm,
    )  # fmt: skip
    model = Llama(config, "cpu", torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in model.checkpoint_tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.ndim == 2 else 0.2))
        if tensor.ndim == 1:
            tensor.add_(1.0)
    model.finish_loading()
    return model


@pytest.fixture
def model() -> Llama:
    return tiny_target()


@pytest.fixture
def target(model) -> DenseTarget:
    return DenseTarget(model, torch.float32)


@pytest.fixture
def training_config() -> TrainingConfig:
    return TrainingConfig(
        num_layers=2, intermediate_size=48, target_layer_ids=(0, 2), block_size=6, mask_token_id=4, min_block=3,
        tokens_per_step=4 * 40, rows_per_token=2, eval_anchors=64, final_eval_anchors=64, warmup_steps=5,
        total_minutes=0.05, minutes_this_run=0.5, log_steps=10,
    )  # fmt: skip


@pytest.fixture
def sampling_config() -> SamplingConfig:
    return SamplingConfig(tokens=64 * 80, lengths=(80,), batch_tokens=32 * 80, minutes=5, user_cap=(6, 12), user_min_p=0.01)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
