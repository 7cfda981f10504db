"""GGUF tensors under their Hugging Face names, undone of what the conversion to GGUF does to them."""

from __future__ import annotations

import re

import torch

from ddtree.models.config import ModelConfig
from ddtree.models.gguf_file import GgufFile

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Read into the config (`RopeConfig` of type "factors"), hence no parameter.
_IN_CONFIG = ("rope_freqs.weight",)


class GgufSource:
    """The tensors of one GGUF file, as `models.weights.fill` wants them."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.name = str(file.path)
        self._file, self._config = file, config
        self._names = {hf_name(name): name for name in file.tensors if name not in _IN_CONFIG}
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._names.items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor in float32 on the CPU."""
        tensor = self._file.tensor(self._names[name])
        if self._config.architecture != "LlamaForCausalLM":
            return tensor
        if ".q_proj." in name:
            return halves_from_pairs(tensor, self._config.num_heads)
        if ".k_proj." in name:
            return halves_from_pairs(tensor, self._config.num_kv_heads)
        return tensor


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name not known stays as it is, so that
    the loader reports it.
    """
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.{kind}"
    return name


def halves_from_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder each head's output rows of `tensor` ([H*D, C] or [H*D]) from rotary pairs (2i, 2i + 1), llama.cpp's
    order for arch llama, to pairs (i, i + D/2), the order of the published checkpoints.
    """
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
