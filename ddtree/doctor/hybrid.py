"""A tiny hybrid target with a drafter, random and built in memory: recurrent layers and trees in a second, without files."""

from __future__ import annotations

import torch

from ddtree.engine.config import EngineConfig
from ddtree.engine.drafter import Drafter
from ddtree.engine.engine import Engine
from ddtree.engine.target import Target
from ddtree.models.config import ModelConfig
from ddtree.models.dflash import DFlash
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.qwen3_5 import Qwen3_5

VOCAB = 96
TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "vocab_size": VOCAB,
    "block_size": 6,
    "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 3]},
}


@torch.inference_mode()
def random_hybrid(device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Engine:
    """An engine of both; the same weights for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    target = Qwen3_5(ModelConfig.from_hf(TARGET), device, dtype)
    fill(target, generator)
    target.finish_loading()
    drafter = DFlash(DrafterConfig.from_hf(DRAFTER), device, dtype)
    fill(drafter, generator)
    layers = drafter.config.target_layer_ids
    config = EngineConfig(max_context=TARGET["max_position_embeddings"], prefill_chunk=64)
    return Engine(Target(target.eval(), layers), Drafter(drafter.eval(), target), config, VOCAB)


def fill(model, generator: torch.Generator) -> None:
    """Random values; decays from hardly any to strong ones, norms around 1 as families store them."""
    for name, tensor in model.checkpoint_tensors():
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith("A_log"):
            values = values.clamp(-2, 1)
        elif name.endswith("dt_bias"):
            values = values - 1
        else:
            values = 0.2 * values + (1.0 if "norm" in name else 0.0)
        tensor.copy_(values)
