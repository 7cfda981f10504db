"""Tiny random models of the Qwen families, transformers' and ours, and engines around them."""

from __future__ import annotations

import json

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from ddtree.engine.config import EngineConfig
from ddtree.engine.drafter import Drafter
from ddtree.engine.engine import Engine
from ddtree.engine.target import Target
from ddtree.models.dflash import DFlash
from ddtree.models.drafter_config import DrafterConfig

VOCAB = 97
PROMPT_LENGTHS = (1, 3, 63, 64, 65, 300)
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Two value heads share a key head, and both have another width; every fourth layer is full attention.
LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


def reference(family: str, config_class: str, **changes):
    """A random model of transformers whose norms, decays and biases are not trivial either."""
    config = getattr(transformers, config_class)(**{**COMMON, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, 1)  # from hardly any decay to a strong one
            elif name.endswith("dt_bias"):
                parameter.normal_(-1, 1)
            else:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def drafter_for(config, vocab_size: int = VOCAB, block_size: int = 6) -> DFlash:
    """A random DFlash drafter that reads two layers of a target."""
    published = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "vocab_size": vocab_size,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": vocab_size - 1, "target_layer_ids": [0, config.num_layers - 1]},
    }
    drafter = DFlash(DrafterConfig.from_hf(published))
    for name, tensor in drafter.checkpoint_tensors():
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return drafter.eval()


def save_inside_multimodal(folder, published, architecture: str, edit=lambda tensors: None):
    """The text checkpoint in `folder` as a multimodal one publishes it, in `published`, after `edit(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, published / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    del text["architectures"]
    outer = {"architectures": [architecture], "text_config": text}
    (published / "config.json").write_text(json.dumps(outer))
    return published


class PeekingDrafter(Drafter):
    """A drafter that, at a depth, ranks the token of `script` first with probability `skill`.

    A random drafter is hardly ever right; this one makes long paths, with wrong siblings beside them.
    """

    script: tuple[int, ...] = ()  # prompt and answer
    skill = 0.7

    def __init__(self, model, target_model, conditioning=None) -> None:
        super().__init__(model, target_model, conditioning)
        self.rng = np.random.default_rng(0)

    def _candidates(self, sequence, states, logits, depth):
        logits = logits.clone()
        for place, true in enumerate(self.script[len(sequence.token_ids) :][:depth]):
            if self.rng.random() < self.skill:
                logits[place, true] += 20
        return super()._candidates(sequence, states, logits, depth)


def engine_around(model, drafter: Drafter, max_running: int = 1) -> Engine:
    """An engine that prefills in chunks of 64."""
    target = Target(model, drafter.model.config.target_layer_ids)
    config = EngineConfig(max_context=512, prefill_chunk=64, max_running=max_running)
    return Engine(target, drafter, config, model.config.vocab_size)
