"""A random checkpoint with every tensor name, shape ratio and config key of Qwen3.6-27B, and one of its DFlash drafter.

Widths are the published ones divided by 128, head dims by 32 (attention) and 16 (linear), so that head counts shrink
too; the number of layers and the vocabulary are the published ones. Vision shapes are stand-ins: only names matter.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, WIDTH, MLP, NUM_LAYERS, HEAD_DIM = 248320, 40, 136, 64, 8
HEADS, KV_HEADS = 6, 1  # published 24 and 4 of 256
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, CONV = 2, 6, 8, 4  # published 16 and 48 of 128
VISION_DEPTH = 27
NUM_SHARDS = 3
NUM_VISION_TENSORS, NUM_MTP_TENSORS = 12 * VISION_DEPTH + 9, 15

NESTED_ROPE = {
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    }
}
FLAT_ROPE = {
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "type": "mrope"},
}
TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": MLP,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * (NUM_LAYERS // 4),
    "linear_conv_kernel_dim": CONV,
    "linear_key_head_dim": LINEAR_DIM,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_value_head_dim": LINEAR_DIM,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": HEADS,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": KV_HEADS,
    "output_gate_type": "swish",
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB,
    **NESTED_ROPE,
}
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "language_model_only": False,
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "video_token_id": 248057,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": VISION_DEPTH,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 9,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 34,
        "model_type": "qwen3_5",
        "num_heads": 1,
        "num_position_embeddings": 18,
        "out_hidden_size": WIDTH,
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "dtype": "bfloat16",
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"],
    "max_position_embeddings": 262144,
    "model_type": "qwen3",
    "num_attention_heads": 4,  # published 32 and 8 of 128
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "num_target_layers": NUM_LAYERS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": VOCAB,
}


def text_layer(kind: str) -> dict[str, tuple[int, ...]]:
    """Shapes of one decoder layer."""
    shapes = {
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
        "mlp.gate_proj.weight": (MLP, WIDTH),
        "mlp.up_proj.weight": (MLP, WIDTH),
        "mlp.down_proj.weight": (WIDTH, MLP),
    }
    if kind == "full_attention":
        return shapes | {
            "self_attn.q_proj.weight": (2 * HEADS * HEAD_DIM, WIDTH),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
            "self_attn.q_norm.weight": (HEAD_DIM,),
            "self_attn.k_norm.weight": (HEAD_DIM,),
        }
    keys, values = KEY_HEADS * LINEAR_DIM, VALUE_HEADS * LINEAR_DIM
    return shapes | {
        "linear_attn.A_log": (VALUE_HEADS,),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, CONV),
        "linear_attn.dt_bias": (VALUE_HEADS,),
        "linear_attn.in_proj_a.weight": (VALUE_HEADS, WIDTH),
        "linear_attn.in_proj_b.weight": (VALUE_HEADS, WIDTH),
        "linear_attn.in_proj_qkv.weight": (2 * keys + values, WIDTH),
        "linear_attn.in_proj_z.weight": (values, WIDTH),
        "linear_attn.norm.weight": (LINEAR_DIM,),
        "linear_attn.out_proj.weight": (WIDTH, values),
    }


def vision_tower() -> dict[str, tuple[int, ...]]:
    """Names as published, shapes that are not."""
    block = {f"norm{i}.{part}": (9,) for i in (1, 2) for part in ("weight", "bias")}
    for name in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        block |= {f"{name}.weight": (9, 9), f"{name}.bias": (9,)}
    shapes = {f"blocks.{i}.{name}": shape for i in range(VISION_DEPTH) for name, shape in block.items()}
    for name in ("patch_embed.proj", "merger.norm", "merger.linear_fc1", "merger.linear_fc2"):
        shapes |= {f"{name}.weight": (9, 9), f"{name}.bias": (9,)}
    return shapes | {"pos_embed.weight": (18, 9)}


def target_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the target's checkpoint."""
    inside = "model.language_model"
    shapes = {"lm_head.weight": (VOCAB, WIDTH), f"{inside}.embed_tokens.weight": (VOCAB, WIDTH)}
    for i, kind in enumerate(TEXT["layer_types"]):
        shapes |= {f"{inside}.layers.{i}.{name}": shape for name, shape in text_layer(kind).items()}
    shapes |= {f"{inside}.norm.weight": (WIDTH,)}
    shapes |= {f"model.visual.{name}": shape for name, shape in vision_tower().items()}
    shapes |= {f"mtp.layers.0.{name}": shape for name, shape in text_layer("full_attention").items()}
    shapes |= {
        f"mtp.{name}.weight": (WIDTH,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    return shapes | {"mtp.fc.weight": (WIDTH, 2 * WIDTH)}


def drafter_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the drafter's checkpoint; embedding and head are the target's."""
    queries, keys = DRAFTER["num_attention_heads"] * HEAD_DIM, DRAFTER["num_key_value_heads"] * HEAD_DIM
    layer = {name: shape for name, shape in text_layer("full_attention").items() if "self_attn" not in name}
    layer |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in ("q", "k")}
    layer |= {f"self_attn.{name}_proj.weight": (keys, WIDTH) for name in ("k", "v")}
    layer |= {"self_attn.q_proj.weight": (queries, WIDTH), "self_attn.o_proj.weight": (WIDTH, queries)}
    shapes = {f"layers.{i}.{name}": shape for i in range(5) for name, shape in layer.items()}
    return shapes | {"fc.weight": (WIDTH, 5 * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Values that keep 64 layers alive: bf16, but for those that are published in fp32."""
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(-4, 1)
    if name.endswith("linear_attn.norm.weight"):
        return torch.empty(shape).normal_(1, 0.1)
    scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
    return torch.empty(shape).normal_(0, scale).bfloat16()


def write_checkpoint(folder: Path, config: dict, shapes: dict[str, tuple[int, ...]], num_shards: int) -> Path:
    """Random tensors of `shapes` in `num_shards` files with an index, or in one file."""
    folder.mkdir()
    names = list(shapes)
    size = -(-len(names) // num_shards)
    weight_map = {}
    for shard in range(num_shards):
        file = (
            f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" if num_shards > 1 else "model.safetensors"
        )
        own = names[shard * size : (shard + 1) * size]
        weight_map |= dict.fromkeys(own, file)
        save_file({name: random_tensor(name, shapes[name]) for name in own}, folder / file)
    if num_shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
