"""Models of published shapes with random weights, made in device memory: what a step costs does not depend on the values.

Random weights say nothing about acceptance; `benchmarks.synthetic` declares one.
"""

from __future__ import annotations

import torch

from benchmarks import published_shapes

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN3_8B_DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}
QWEN3_CODER_30B = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 10000000,
    "max_position_embeddings": 262144,
}
# The drafter's own depth and width are assumed: as the 8B's, at this model's width.
QWEN3_CODER_30B_DRAFTER = {
    **QWEN3_8B_DRAFTER,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 12, 23, 34, 45]},
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "num_target_layers": 48,
    "max_position_embeddings": 262144,
}
# Every kind of layer in widths that a CPU runs in a second: for trying the scripts.
SMALL = {
    **published_shapes.TARGET["text_config"],
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 512,
}
SMALL_DRAFTER = {
    **published_shapes.DRAFTER,
    "dflash_config": {"mask_token_id": 511, "target_layer_ids": [0, 2]},
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_target_layers": 4,
    "vocab_size": 512,
}
DENSE = {**QWEN3_8B, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE |= {"head_dim": 32, "vocab_size": 512}
DENSE_DRAFTER = {**QWEN3_8B_DRAFTER, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "hidden_size": 64, "intermediate_size": 96}
DENSE_DRAFTER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "num_target_layers": 3}
DENSE_DRAFTER |= {"dflash_config": {"mask_token_id": 511, "target_layer_ids": [0, 2]}}
PAIRS = {
    "qwen3.6-27b": (published_shapes.TARGET, published_shapes.DRAFTER),
    "qwen3-8b": (QWEN3_8B, QWEN3_8B_DRAFTER),
    "qwen3-coder-30b-a3b": (QWEN3_CODER_30B, QWEN3_CODER_30B_DRAFTER),
    "small": (SMALL, SMALL_DRAFTER),
    "small-dense": (DENSE, DENSE_DRAFTER),
}


@torch.inference_mode()
def random_pair(name: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16):
    """Target and drafter of a shape in `PAIRS`; ValueError for another name."""
    from ddtree.models.config import ModelConfig
    from ddtree.models.dflash import DFlash
    from ddtree.models.drafter_config import DrafterConfig
    from ddtree.models.registry import TARGETS

    if name not in PAIRS:
        raise ValueError(f"shapes must be one of {', '.join(PAIRS)}, got {name!r}")
    torch.manual_seed(0)
    published, drafter = PAIRS[name]
    config = ModelConfig.from_hf(published)
    target = TARGETS[config.architecture](config, device, dtype)
    model = DFlash(DrafterConfig.from_hf(drafter, "drafter"), device, dtype)
    for each in (target, model):
        for tensor_name, tensor in each.checkpoint_tensors():
            fill(tensor_name, tensor)
    target.finish_loading()
    return target.eval(), model.eval()


def random_conditioning(target, drafter, summary: str):
    """An adapter of the default size with random weights, bound to the target."""
    from ddtree.models.adapter import Adapter, AdapterConfig
    from ddtree.models.conditioning import Conditioning

    shape = AdapterConfig(drafter.config.hidden_size, drafter.config.block_size, summary=summary)
    adapter = Adapter(shape, target.device, target.dtype)
    for parameter in adapter.parameters():
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    return Conditioning(adapter, target, tables=True)


def fill(name: str, tensor: torch.Tensor) -> None:
    """Values that keep many layers alive: decays from none to strong, norms around one as their family stores them."""
    if name.endswith("A_log"):
        tensor.uniform_(-4, 1)
    elif tensor.dim() == 1:
        centred = "layers" in name and "linear_attn" not in name and name.startswith("model")
        tensor.normal_(0 if centred and tensor.dtype == torch.float32 else 1, 0.1)
    else:
        tensor.normal_(0, tensor.shape[-1] ** -0.5)
