"""Safetensors loading: every tensor used exactly once, and what the errors say."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.models.registry import load_target
from ddtree.models.weights import SafetensorsSource, fill
from tests.closeness import assert_close
from tests.models.tiny import feed, random_ids, reference, saved_and_loaded


@pytest.fixture
def folder(tmp_path):
    """A Llama checkpoint in one file."""
    reference("Llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """A Llama checkpoint in several files."""
    reference("Llama").save_pretrained(tmp_path, max_shard_size="40KB")
    return tmp_path


def change(folder, edit):
    """Rewrite the only weight file after `edit(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(path, dtype=torch.float32):
    return load_target(path, "cpu", dtype)


def test_loads_in_the_dtype_asked_for_and_without_gradients(folder):
    model = load(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.rotary.frequencies.dtype == torch.float32


def test_a_missing_tensor_is_named(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: missing from .*\[80, 48\]"
    ):
        load(folder)


def test_a_tensor_left_over_is_named(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias: in .* no such tensor"):
        load(folder)


def test_a_wrong_shape_is_named(folder):
    change(
        folder,
        lambda tensors: tensors.update({"model.layers.2.self_attn.k_proj.weight": torch.zeros(16, 40)}),
    )
    message = r"model\.layers\.2\.self_attn\.k_proj\.weight: expected \[16, 48\], checkpoint has \[16, 40\]"
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_inverse_frequencies_are_tolerated_and_logged(folder, caplog):
    change(
        folder,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    with caplog.at_level(logging.INFO, logger="ddtree.models.weights"):
        load(folder)
    assert "rotary_emb.inv_freq: not used" in caplog.text


def test_a_tied_head_may_repeat_the_embedding_but_not_differ(tmp_path, caplog):
    reference("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    with caplog.at_level(logging.INFO, logger="ddtree.models.weights"):
        model = load(tmp_path)
    assert "lm_head.weight: not used" in caplog.text
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.data_ptr()
    change(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(
        ValueError, match=r"lm_head\.weight: the config ties it to model\.embed_tokens\.weight"
    ):
        load(tmp_path)


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name}: missing, but model.safetensors.index.json lists it"):
        load(sharded)


def test_shards_without_an_index_are_refused(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="safetensors files but no model.safetensors.index.json"):
        load(sharded)


def test_a_tensor_in_two_shards_is_named(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = sharded / sorted(set(index["weight_map"].values()))[0]
    twice = sharded / "model-twice.safetensors"
    twice.write_bytes(shard.read_bytes())
    index["weight_map"]["twice"] = twice.name
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-twice\.safetensors: .* is in another shard"):
        load(sharded)


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_truncated_file_says_so_and_what_to_do(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: .*download it again"):
        load(folder)


def test_a_file_that_is_not_safetensors_says_so(folder):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 9)
    with pytest.raises(ValueError, match=r"model\.safetensors: .*not a safetensors file.*download it again"):
        load(folder)


def test_pickled_weights_are_refused_with_a_remedy(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only \.bin \(pickle\) weights.*save_pretrained"):
        load(folder)


def test_a_config_error_names_the_file(folder):
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["OtterForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: unknown architecture 'OtterForCausalLM'; known are"):
        load(folder)


def test_a_path_that_is_no_model_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"neither config\.json nor a \.gguf file"):
        load(tmp_path)


def test_fill_converts_into_slices(tmp_path):
    save_file({"a": torch.ones(2, 3).half(), "b": torch.full((1, 3), 2.0)}, tmp_path / "model.safetensors")
    fused = torch.zeros(3, 3)
    fill([("a", fused[:2]), ("b", fused[2:])], SafetensorsSource(tmp_path))
    assert fused.tolist() == [[1.0] * 3, [1.0] * 3, [2.0] * 3]


def test_bfloat16_stays_near_float32(tmp_path):
    theirs = reference("Qwen3", head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    full = saved_and_loaded(theirs, tmp_path)
    half = load(tmp_path, torch.bfloat16)
    token_ids = random_ids(30)
    expected = feed(full, full.new_cache(), token_ids)[0]
    assert_close("logits", feed(half, half.new_cache(), token_ids)[0], expected, 0.03)
