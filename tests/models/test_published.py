"""Qwen3.6-27B and its drafter as published, at reduced width: load, generate, and name what is wrong."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.caches.kv import KVCache
from ddtree.caches.recurrent import RecurrentCache
from ddtree.engine.loading import load_engine
from ddtree.engine.request import Request
from ddtree.models.config import ModelConfig
from ddtree.models.dflash import load_drafter
from ddtree.models.registry import load_target
from tests.models import fake_qwen3_6 as fake

PROMPT = (248045, 846, 198, 9419, 0, 248046, 198, 248045, 74455, 198)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("published") / "Qwen3.6-27B"
    return fake.write_checkpoint(folder, fake.CONFIG, fake.target_shapes(), fake.NUM_SHARDS)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    torch.manual_seed(6)
    folder = tmp_path_factory.mktemp("published") / "Qwen3.6-27B-DFlash"
    return fake.write_checkpoint(folder, fake.DRAFTER, fake.drafter_shapes(), 1)


def variant(folder, copy, config=None, edit=None, shard=None):
    """`folder` again, linked, with another config or with one shard edited."""
    copy.mkdir()
    for file in folder.iterdir():
        if file.name != shard:
            (copy / file.name).symlink_to(file)
    if config is not None:
        (copy / "config.json").unlink()
        (copy / "config.json").write_text(json.dumps(config))
    if edit is not None:
        tensors = load_file(folder / shard)
        edit(tensors)
        save_file(tensors, copy / shard)
    return copy


def tokens(engine, budget: int) -> tuple[int, ...]:
    return engine.generate(Request(PROMPT, 12, tree_budget=budget)).token_ids


def test_loads_and_generates_in_either_form_of_config(target, drafter, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ddtree")  # what is seen where nobody has set up logging
    engine = load_engine(target, drafter, device="cpu", dtype="float32", max_context=64)
    aside = [record.message for record in caplog.records if "left aside" in record.message]
    assert len(aside) == 2
    assert f"{fake.NUM_VISION_TENSORS} tensors model.visual.* left aside: the vision tower" in aside[0]
    assert f"{fake.NUM_MTP_TENSORS} tensors mtp.* left aside: the multi-token prediction layer" in aside[1]
    model = engine.target.model
    assert engine.target.feature_layers == (1, 16, 31, 46, 61) and engine.block_size == 16
    kinds = [type(cache) for cache in model.new_cache().layers]
    assert kinds == [RecurrentCache, RecurrentCache, RecurrentCache, KVCache] * 16
    assert model.config.rope.partial_rotary_factor == 0.25 and model.config.rope.theta == 1e7
    plain = tokens(engine, 0)
    assert len(set(plain)) > 3
    assert tokens(engine, 16) == tokens(engine, 64) == plain
    # The same checkpoint with its config keys where other versions keep them.
    flat = {key: value for key, value in fake.TEXT.items() if key != "rope_parameters"} | fake.FLAT_ROPE
    nested = {key: value for key, value in fake.DRAFTER.items() if key not in ("rope_theta", "block_size")}
    nested["rope_parameters"] = {"rope_theta": 10000000, "rope_type": "default"}
    nested["dflash_config"] = {**fake.DRAFTER["dflash_config"], "block_size": 16}
    other = load_engine(
        variant(target, tmp_path / "flat", {**fake.CONFIG, "text_config": flat}),
        variant(drafter, tmp_path / "nested", nested),
        device="cpu",
        dtype="float32",
        max_context=64,
    )
    assert other.target.model.config == model.config
    assert tokens(other, 16) == plain


INSIDE = "model.language_model.layers"


@pytest.mark.parametrize(
    "name, shape, message",
    [
        (f"{INSIDE}.40.linear_attn.dt_bias", None, "missing from"),
        (f"{INSIDE}.43.self_attn.q_norm.weight", None, "missing from"),
        (f"{INSIDE}.40.linear_attn.in_proj_qkvz.weight", (4, 4), "the model has no such tensor"),
        (f"{INSIDE}.64.input_layernorm.weight", (40,), "the model has no such tensor"),
        ("model.audio.proj.weight", (4, 4), "the model has no such tensor"),
        (
            f"{INSIDE}.40.linear_attn.conv1d.weight",
            (80, 4),
            r"expected \[80, 1, 4\], checkpoint has \[80, 4\]",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(target, tmp_path, name, shape, message):
    def edit(tensors):
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)

    shard = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"][
        f"{INSIDE}.40.mlp.up_proj.weight"
    ]
    folder = variant(target, tmp_path / "edited", edit=edit, shard=shard)
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        load_target(folder, "cpu", torch.bfloat16)


@pytest.mark.parametrize(
    "name, gone", [("layers.4.self_attn.q_norm.weight", True), ("layers.5.norm.weight", False)]
)
def test_a_drafter_tensor_that_does_not_fit_is_named(drafter, target, tmp_path, name, gone):
    def edit(tensors):
        if gone:
            del tensors[name]
        else:
            tensors[name] = torch.zeros(40)

    folder = variant(drafter, tmp_path / "edited", edit=edit, shard="model.safetensors")
    config = ModelConfig.from_hf(fake.CONFIG)
    with pytest.raises(ValueError, match=f"^{name}: {'missing from' if gone else 'in .*no such tensor'}"):
        load_drafter(folder, config)


def text_config(**changes) -> dict:
    text = {key: value for key, value in {**fake.TEXT, **changes}.items() if value != "absent"}
    return {**fake.CONFIG, "text_config": text}


def test_the_text_config_alone_is_the_same_model():
    assert ModelConfig.from_hf(fake.TEXT) == ModelConfig.from_hf(fake.CONFIG)
    named = {**fake.TEXT, "architectures": ["Qwen3_5ForCausalLM"]}
    by_interval = {key: value for key, value in named.items() if key != "layer_types"}
    assert ModelConfig.from_hf(named) == ModelConfig.from_hf(by_interval) == ModelConfig.from_hf(fake.CONFIG)


def test_the_outer_config_says_whether_the_head_is_tied():
    tied = {**text_config(tie_word_embeddings="absent"), "tie_word_embeddings": True}
    assert ModelConfig.from_hf(tied).tie_word_embeddings


@pytest.mark.parametrize(
    "config, message",
    [
        (text_config(attn_output_gate=False), "attn_output_gate=False is not supported"),
        (text_config(output_gate_type="sigmoid"), "output_gate_type='sigmoid' is not supported"),
        (text_config(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype='bfloat16' is not supported"),
        (text_config(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
        (text_config(layer_types=["linear_attention"]), "layer_types has 1 entries for num_hidden_layers 64"),
        (
            text_config(layer_types=["sliding_attention"] * 64),
            "layer_types='sliding_attention' is not supported",
        ),
        (text_config(linear_num_value_heads=5), "linear_num_value_heads 5 is not a multiple of"),
        (text_config(linear_conv_kernel_dim=1), "linear_conv_kernel_dim must be >= 2, got 1"),
        (text_config(linear_key_head_dim="absent"), "linear_key_head_dim is missing"),
        (text_config(head_dim="absent"), "head_dim is missing"),
        (text_config(rope_parameters="absent"), "rope_theta is missing"),
        ({**fake.CONFIG, "quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8"),
        (
            {key: value for key, value in fake.CONFIG.items() if key != "text_config"},
            "text_config is missing",
        ),
        ({**fake.CONFIG, "architectures": ["Qwen2_5OmniModel"]}, "unknown architecture 'Qwen2_5OmniModel'"),
    ],
)
def test_refuses_what_it_would_have_to_guess(config, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config)


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok must lie in 1 \.\.\. 4"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
    ],
)
def test_refuses_experts_it_would_have_to_guess(changes, message):
    config = {**fake.TEXT, **EXPERTS, "model_type": "qwen3_5_moe_text"}
    assert ModelConfig.from_hf(config).moe.num_experts == 4
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**config, **changes})
