"""The shape of `hybrid-tiny`, its fresh weights, and its folder on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from ddtree.models.config import ModelConfig
from ddtree.models.registry import TARGETS

VOCAB_SIZE, NUM_LAYERS = 2048, 8
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 576,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * (NUM_LAYERS // 4),
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": VOCAB_SIZE,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its published name."""
    model = TARGETS["Qwen3_5ForCausalLM"](ModelConfig.from_hf(CONFIG), "meta", torch.float32)
    return {name: tuple(tensor.shape) for name, tensor in model.checkpoint_tensors()}


def fresh(seed: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Float32 weights to start from: normal(0.02), less where a layer writes to the residual stream.

    The decays start slow (steps of 0.001 to 0.1, rates of 1 to 16, as Mamba-2 and Gated DeltaNet are trained), so that a state
    remembers a whole problem.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes().items():
        tensor = torch.empty(shape)
        if name.endswith("A_log"):
            tensor.uniform_(1, 16, generator=generator).log_()
        elif name.endswith("dt_bias"):
            step = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
            tensor = step + torch.log(-torch.expm1(-step))  # softplus of it is the step
        elif name.endswith("linear_attn.norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith("conv1d.weight"):
            tensor.uniform_(-0.5, 0.5, generator=generator)
        elif len(shape) == 1:
            tensor.zero_()  # zero-centred norms
        else:
            residual = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            tensor.normal_(0, 0.02 / (2 * NUM_LAYERS) ** 0.5 if residual else 0.02, generator=generator)
        tensors[name] = tensor.to(device)
    return tensors


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> int:
    """Write config.json and model.safetensors: matrices in bfloat16, what the reference keeps in float32 in float32.

    Returns the bytes of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = ("A_log", "dt_bias", "norm.weight")
    own = {
        name: tensor.detach().cpu().to(torch.float32 if name.endswith(kept) else torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    return (folder / "model.safetensors").stat().st_size
