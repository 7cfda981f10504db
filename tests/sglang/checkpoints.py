"""SmolLM2 as SGLang reads models: a folder of config.json, safetensors and tokenizer, written from the GGUF that we fetch.

`python -m tests.sglang.checkpoints FOLDER [GGUF]` writes two: `whole`, and `padded`, whose attention has one more group of heads, all
zeros, so that two tensor-parallel ranks share its 12 query and 4 key/value heads evenly. Both are the same function. And
`drafter`, SmolLM2's in safetensors, for programs that read no GGUF.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from ddtree.models.dflash import load_drafter
from ddtree.models.registry import load_target
from ddtree.sources import fetch, resolve
from ddtree.text import Tokenizer
from ddtree.training.export import save_drafter

HEAD_AXIS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}


def write(folder: Path, more_groups: int = 0, source: Path | None = None) -> Path:
    """The target of `source` in fp32, with `more_groups` groups of attention heads that add nothing."""
    source = source or fetch("smollm2", progress=False)
    model = load_target(source, "cpu", torch.float32)
    config = model.config
    width = {"q_proj": config.num_heads // config.num_kv_heads * config.head_dim, "k_proj": config.head_dim}
    width |= {"v_proj": width["k_proj"], "o_proj": width["q_proj"]}
    tensors = {}
    for name, tensor in model.checkpoint_tensors():
        part = name.split(".")[-2]
        if more_groups and part in HEAD_AXIS:
            shape = list(tensor.shape)
            shape[HEAD_AXIS[part]] = width[part] * more_groups
            tensor = torch.cat([tensor, torch.zeros(shape)], dim=HEAD_AXIS[part])
        tensors[name] = tensor.detach().clone().contiguous()
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    group = config.num_heads // config.num_kv_heads
    tokenizer = Tokenizer.load(source)
    folder.mkdir(parents=True, exist_ok=True)
    published = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads + group * more_groups,
        "num_key_value_heads": config.num_kv_heads + more_groups,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": tokenizer.pretrained.bos_token_id,
        "eos_token_id": sorted(tokenizer.eos_token_ids),
        "torch_dtype": "float32",
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published, indent=2))
    tokenizer.pretrained.save_pretrained(folder)
    return folder


def write_drafter(folder: Path) -> Path:
    """SmolLM2's drafter in fp32."""
    files = resolve("smollm2", progress=False)
    target = load_target(files.target, "cpu", torch.float32)
    model = load_drafter(files.drafter, target.config, "cpu", torch.float32)
    save_drafter(model, folder, model.config.raw)
    return folder


if __name__ == "__main__":
    given = Path(sys.argv[2]) if sys.argv[2:] else None
    if given is None:
        print(write_drafter(Path(sys.argv[1]) / "drafter"))
    for name, groups in (("whole", 0), ("padded", 1)):
        print(write(Path(sys.argv[1]) / name, groups, given))
