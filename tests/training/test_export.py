"""Drafters written by `save_drafter` load again: exactly as safetensors, within 8 bits as GGUF."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from ddtree.models.dflash import DFlash, load_drafter
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.gguf_file import GgufFile
from ddtree.training.export import save_drafter

# MLP rows of 48 are no whole Q8_0 blocks: down_proj stays in float32.
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 40,
    "num_target_layers": 8,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 5], "shrinkable_block": True},
}
TARGET = SimpleNamespace(hidden_size=64, vocab_size=40, num_layers=8)


def random_drafter(config: dict = CONFIG, dtype: torch.dtype = torch.float32) -> DFlash:
    model = DFlash(DrafterConfig.from_hf(config), dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    for name, view in model.checkpoint_tensors():
        offset = 1.0 if "norm" in name else 0.0
        view.copy_(offset + 0.2 * torch.randn(view.shape, generator=generator))
    return model


def draft(model: DFlash) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    cache = model.new_cache()
    model.absorb(torch.randn(9, 128, generator=generator).to(model.dtype), cache)
    return model(torch.randn(1, 4, 64, generator=generator).to(model.dtype), [cache])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_round_trip_is_exact(tmp_path, dtype):
    model = random_drafter(dtype=dtype)
    path = save_drafter(model, tmp_path / "drafter", CONFIG)
    loaded = load_drafter(tmp_path / "drafter", TARGET, "cpu", dtype)
    assert torch.equal(draft(loaded), draft(model))
    assert loaded.config == model.config and loaded.config.shrinkable_block
    with safe_open(path, "pt") as file:
        assert file.get_tensor("fc.weight").dtype == dtype
        assert {"hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"} <= set(file.keys())


@pytest.mark.parametrize("alone", [False, True], ids=["folder", "file alone"])
def test_gguf_round_trip_is_within_eight_bits(tmp_path, alone):
    model = random_drafter()
    path = save_drafter(model, tmp_path, CONFIG, "Q8_0")
    loaded = load_drafter(path if alone else tmp_path, TARGET, "cpu", torch.float32)
    assert loaded.config == model.config
    for (name, stored), (_, original) in zip(
        loaded.checkpoint_tensors(), model.checkpoint_tensors(), strict=True
    ):
        error = float((stored - original).abs().max() / original.abs().max())
        assert error < (0.5 / 127 * 1.05 if original.ndim == 2 else 1e-9), f"{name}: {error:.1e}"
    error = float((draft(loaded) - draft(model)).abs().max())
    assert error < 0.1


def test_gguf_keeps_norms_and_odd_rows_in_float32(tmp_path):
    file = GgufFile(save_drafter(random_drafter(), tmp_path, CONFIG, "Q8_0"))
    kinds = {name: tensor.quantization.name for name, tensor in file.tensors.items()}
    assert kinds["fc.weight"] == kinds["layers.0.self_attn.v_proj.weight"] == "Q8_0"
    assert kinds["layers.0.mlp.down_proj.weight"] == "F32"
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    assert json.loads(file.metadata["dflash.config"]) == CONFIG


@pytest.mark.parametrize("quantization", [None, "Q8_0"])
def test_a_draft_vocabulary_survives(tmp_path, quantization):
    config = {**CONFIG, "draft_vocab_size": 5}
    model = random_drafter(config)
    model.draft_token_ids.copy_(torch.tensor([0, 2, 11, 38, 39]))
    save_drafter(model, tmp_path, config, quantization)
    loaded = load_drafter(tmp_path, TARGET)
    assert torch.equal(loaded.draft_token_ids, model.draft_token_ids)


def test_tensors_under_z_labs_names_are_taken_too(tmp_path):
    model = random_drafter()
    save_drafter(dict(model.checkpoint_tensors()), tmp_path, CONFIG)
    assert torch.equal(draft(load_drafter(tmp_path, TARGET)), draft(model))


def test_saving_again_replaces_the_other_format(tmp_path):
    model = random_drafter()
    save_drafter(model, tmp_path, CONFIG)
    save_drafter(model, tmp_path, CONFIG, "Q8_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "drafter.gguf"]


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    tensors = dict(random_drafter().checkpoint_tensors())
    del tensors["layers.1.self_attn.q_norm.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_norm\.weight: missing"):
        save_drafter(tensors, tmp_path / "missing", CONFIG)
    tensors = {**dict(random_drafter().checkpoint_tensors()), "step": torch.zeros(1)}
    with pytest.raises(ValueError, match="step: in the drafter to save"):
        save_drafter(tensors, tmp_path / "extra", CONFIG)
    with pytest.raises(ValueError, match=r"gate_proj\.weight: its config asks for \[64, 64\]"):
        save_drafter(random_drafter(), tmp_path / "shape", {**CONFIG, "intermediate_size": 64})
    with pytest.raises(ValueError, match="quantization must be one of"):
        save_drafter(random_drafter(), tmp_path / "kind", CONFIG, "Q4_0")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_two_gguf_files_is_refused(tmp_path):
    path = save_drafter(random_drafter(), tmp_path, CONFIG, "Q8_0")
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"2 \.gguf files \(drafter\.gguf, other\.gguf\)"):
        load_drafter(tmp_path, TARGET)


def test_a_gguf_without_config_is_refused(tmp_path):
    path = save_drafter(random_drafter(), tmp_path, CONFIG, "Q8_0")
    path.write_bytes(path.read_bytes().replace(b"dflash.config", b"dflash.confiX"))
    with pytest.raises(ValueError, match=r"no dflash\.config in it"):
        load_drafter(path, TARGET)
