"""From a folder or file on disk to a target. (Drafters: `models.dflash.load_drafter`.)"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ddtree.models.config import ModelConfig
from ddtree.models.gguf_file import GgufFile
from ddtree.models.gguf_weights import GgufSource
from ddtree.models.llama import Llama
from ddtree.models.published import Naming, leave_aside
from ddtree.models.qwen3 import Qwen3
from ddtree.models.qwen3_5 import Qwen3_5
from ddtree.models.qwen3_5_moe import Qwen3_5Moe
from ddtree.models.qwen3_moe import Qwen3Moe
from ddtree.models.qwen3_next import Qwen3Next
from ddtree.models.target_model import TargetModel
from ddtree.models.weights import SafetensorsSource, TensorSource, fill

# `ModelConfig` refuses architectures that are not here, listing those that are.
TARGETS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Qwen3_5ForCausalLM": Qwen3_5,
    "Qwen3_5MoeForCausalLM": Qwen3_5Moe,
    "Qwen3NextForCausalLM": Qwen3Next,
}


def load_target(path: str | Path, device: torch.device | str, dtype: torch.dtype) -> TargetModel:
    """Load the target in `path`: a folder with config.json and safetensors, a folder with exactly one .gguf file, or
    a .gguf file. Parameters are on `device` in `dtype`, but for those that a family keeps in fp32; without gradients.

    FileNotFoundError when there is no such path; ValueError, naming the file and what to do, for everything that is
    wrong with its content.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    config, source = _open(path)
    model = TARGETS[config.architecture](config, device, dtype)
    source = leave_aside(source, config.architecture)
    naming = Naming.of(source.shapes)
    tied = {"lm_head.weight": naming.name("model.embed_tokens.weight")}
    duplicates = tied if config.tie_word_embeddings else {}
    fill(naming.tensors(model.checkpoint_tensors()), source, duplicates)
    model.finish_loading()
    return model.eval()


def target_files(path: str | Path) -> tuple[ModelConfig, dict[str, tuple[int, ...]]]:
    """A target's config and the shapes of its tensors by their published names, no weight read. Raises as `load_target`."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    config, source = _open(path)
    return config, dict(leave_aside(source, config.architecture).shapes)


def _open(path: Path) -> tuple[ModelConfig, TensorSource]:
    config_json = path / "config.json"
    if path.is_dir() and config_json.is_file():
        try:
            config = ModelConfig.from_hf(json.loads(config_json.read_text()))
        except ValueError as error:
            raise ValueError(f"{config_json}: {error}") from error
        return config, SafetensorsSource(path)
    file = _only_gguf(path) if path.is_dir() else path
    reader = GgufFile(file)
    config = ModelConfig.from_gguf(reader)
    return config, GgufSource(reader, config)


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if not files:
        raise ValueError(
            f"{folder}: neither config.json nor a .gguf file; give a model's folder or a .gguf file"
        )
    raise ValueError(
        f"{folder}: {len(files)} .gguf files ({', '.join(f.name for f in files)}); name the one to load"
    )
