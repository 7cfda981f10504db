"""Write a drafter as a checkpoint that `load_drafter` (and, unquantised, z-lab's package) reads: arXiv 2602.06036.

Nothing is written that could not be read back: the config is parsed and every name and shape checked against it.
Files replace older ones in one step, so a reader never sees half a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from safetensors.torch import save_file

from ddtree.models.dflash import DFlash
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.drafter_files import D2T, GGUF_ARCHITECTURE, GGUF_CONFIG_KEY, T2D

Q8_0_BLOCK = 32  # values that share one scale; a row must be made of whole blocks
QUANTIZATIONS = (None, "Q8_0")


def save_drafter(
    model: DFlash | Mapping[str, torch.Tensor],
    folder: str | Path,
    config_dict: Mapping[str, Any],
    quantization: str | None = None,
) -> Path:
    """Write config.json and the weights into `folder`; returns the weights' path.

    Args:
        model: a drafter, or its tensors under z-lab's names (`layers.0.self_attn.q_proj.weight`, `fc.weight`, ...).
        config_dict: the published config, in any form that `DrafterConfig.from_hf` reads.
        quantization: None writes model.safetensors in the model's dtype; "Q8_0" writes drafter.gguf with matrices
            of 8 bits, norms and rows not divisible by 32 in float32, and the config inside.

    Raises:
        ValueError: an unknown quantization, or a tensor that the config does not ask for, lacks or shapes otherwise.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {QUANTIZATIONS}, got {quantization!r}")
    folder, config = Path(folder), DrafterConfig.from_hf(config_dict, "config of the drafter to save")
    tensors = _named_tensors(model)
    _check(tensors, config)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(config_dict), indent=2) + "\n"
    if quantization is None:
        weights, stale = folder / "model.safetensors", folder / "drafter.gguf"
        _replace(weights, lambda path: _write_safetensors(path, tensors))
    else:
        weights, stale = folder / "drafter.gguf", folder / "model.safetensors"
        _replace(weights, lambda path: _write_gguf(path, tensors, text))
    _replace(folder / "config.json", lambda path: path.write_text(text))
    # Two weight files in one folder would leave open which is served.
    stale.unlink(missing_ok=True)
    return weights


def _named_tensors(model: DFlash | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not isinstance(model, DFlash):
        return {name: tensor.detach() for name, tensor in model.items()}
    tensors = dict(model.checkpoint_tensors())
    if model.draft_token_ids is not None:
        ids = model.draft_token_ids.cpu()
        tensors[D2T] = ids - torch.arange(len(ids))
        tensors[T2D] = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def _check(tensors: Mapping[str, torch.Tensor], config: DrafterConfig) -> None:
    # A model without memory knows its tensors' names and shapes.
    skeleton = DFlash(config, device="meta", own_head="lm_head.weight" in tensors)
    expected = {name: tuple(view.shape) for name, view in skeleton.checkpoint_tensors()}
    if config.draft_vocab_size is not None:
        expected[D2T] = (config.draft_vocab_size,)
        expected[T2D] = (config.vocab_size,)
    for name, shape in expected.items():
        if name not in tensors:
            raise ValueError(f"{name}: missing from the drafter to save, its config asks for {list(shape)}")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{name}: its config asks for {list(shape)}, the drafter has {list(tensors[name].shape)}"
            )
    for name in tensors:
        if name not in expected:
            raise ValueError(f"{name}: in the drafter to save, but its config has no such tensor")


def _replace(path: Path, write) -> None:
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # Views of fused weights must become tensors of their own.
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, path, metadata={"format": "pt"})


def _write_gguf(path: Path, tensors: Mapping[str, torch.Tensor], config_text: str) -> None:
    writer = GGUFWriter(path, GGUF_ARCHITECTURE)
    writer.add_string(GGUF_CONFIG_KEY, config_text)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for name, tensor in tensors.items():
        if name == T2D:
            continue  # d2t says the same, and GGUF has no bool
        # d2t's offsets are whole numbers below 2^24: exact in float32, which every reader of GGUF knows.
        values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        if quantizable(values):
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantizable(values: np.ndarray) -> bool:
    """Whether Q8_0 takes this tensor: a matrix whose rows are whole blocks. Norms and biases are vectors."""
    return values.ndim == 2 and values.shape[1] % Q8_0_BLOCK == 0
