"""DrafterConfig: the three published forms read the same; whatever would be guessed is refused by name."""

from types import SimpleNamespace

import pytest

from ddtree.models.drafter_config import DrafterConfig

LAYERS = ["sliding_attention"] * 4 + ["full_attention"]
STACK = {
    "hidden_size": 5120,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "rms_norm_eps": 1e-6,
    "layer_types": LAYERS,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
FLAT = {
    **STACK,
    "architectures": ["DFlashDraftModel"],
    "rope_theta": 10000000,
    "num_target_layers": 64,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}
NESTED = {
    **STACK,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "num_target_layers": 64,
    "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": {
        **STACK,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    },
    "aux_hidden_state_layer_ids": [2, 17, 32, 47, 62],
    "block_size": 16,
    "mask_token_id": 248070,
    "draft_vocab_size": 32000,
}
TARGET = SimpleNamespace(hidden_size=5120, vocab_size=248320, num_layers=64)


def changed(config: dict, **changes) -> dict:
    """A copy with keys replaced, or dropped where the value is None; `dflash` changes the nested dict."""
    config = {**config, "dflash_config": dict(config.get("dflash_config", {}))}
    config["dflash_config"].update(changes.pop("dflash", {}))
    config.update(changes)
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v is not None}
    return {k: v for k, v in config.items() if v is not None}


@pytest.mark.parametrize("published", [FLAT, NESTED, SPECULATORS], ids=["flat", "nested", "speculators"])
def test_every_published_form_reads_the_same(published):
    config = DrafterConfig.from_hf(published)
    assert config.block_size == 16
    assert config.mask_token_id == 248070
    assert config.target_layer_ids == (1, 16, 31, 46, 61)
    assert (config.rope.theta, config.rope.rope_type) == (10000000, "default")
    assert config.layer_types == tuple(LAYERS)
    assert [config.window(i) for i in (0, 4)] == [2048, None]
    assert [config.attends_causally(i) for i in (0, 4)] == [True, False]
    assert not config.shrinkable_block
    config.check_against(TARGET)


def test_only_speculators_has_a_draft_vocabulary():
    assert DrafterConfig.from_hf(FLAT).draft_vocab_size is None
    assert DrafterConfig.from_hf(SPECULATORS).draft_vocab_size == 32000
    whole = {**SPECULATORS, "draft_vocab_size": 248320}
    assert DrafterConfig.from_hf(whole).draft_vocab_size is None


def test_the_nested_value_wins_over_the_top_level():
    config = DrafterConfig.from_hf(
        changed(FLAT, dflash={"block_size": 8, "output_multiplier": 0.5}, output_multiplier=2)
    )
    assert config.block_size == 8
    assert config.output_multiplier == 0.5


def test_mask_token_id_zero_is_a_token():
    assert DrafterConfig.from_hf(changed(FLAT, dflash={"mask_token_id": 0})).mask_token_id == 0


@pytest.mark.parametrize("is_causal", [True, False])
def test_is_causal_overrides_every_layer(is_causal):
    config = DrafterConfig.from_hf(changed(FLAT, is_causal=is_causal))
    assert {config.attends_causally(i) for i in range(5)} == {is_causal}


def test_speculators_non_causal_windows_are_bidirectional():
    config = DrafterConfig.from_hf({**SPECULATORS, "sliding_window_non_causal": True})
    assert not any(config.attends_causally(i) for i in range(5))


def test_without_layer_types_layers_slide_as_qwen3_says():
    plain = changed(FLAT, layer_types=None, use_sliding_window=None)
    assert set(DrafterConfig.from_hf(plain).layer_types) == {"full_attention"}
    late = changed(FLAT, layer_types=None, max_window_layers=3)
    assert DrafterConfig.from_hf(late).layer_types == ("full_attention",) * 3 + ("sliding_attention",) * 2


def test_rope_scaling_of_the_old_spelling_is_read():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = DrafterConfig.from_hf(changed(FLAT, rope_scaling=scaling)).rope
    assert (rope.rope_type, rope.factor, rope.theta) == ("yarn", 4.0, 10000000)


def test_a_broken_rope_names_the_file():
    with pytest.raises(ValueError, match=r"config\.json: .*yarn.*original_max_position_embeddings"):
        DrafterConfig.from_hf(changed(FLAT, rope_scaling={"type": "yarn", "factor": 4.0}))


@pytest.mark.parametrize(
    ("published", "named"),
    [
        (changed(FLAT, block_size=None), "block_size"),
        (changed(NESTED, dflash={"block_size": None}), "block_size"),
        (changed(FLAT, dflash={"mask_token_id": None}), "mask_token_id"),
        (changed(FLAT, dflash={"target_layer_ids": None}), "target_layer_ids"),
        (changed(SPECULATORS, aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids"),
        (changed(SPECULATORS, mask_token_id=None), "mask_token_id"),
        (changed(FLAT, rope_theta=None), "rope_theta"),
    ],
)
def test_what_would_be_guessed_is_an_error_naming_key_file_and_remedy(published, named):
    with pytest.raises(ValueError, match=rf"my/config\.json: {named} is missing.*; add "):
        DrafterConfig.from_hf(published, "my/config.json")


@pytest.mark.parametrize(
    ("published", "message"),
    [
        (changed(FLAT, architectures=["DFlash2DraftModel"]), "DFlash 2 checkpoint"),
        (changed(FLAT, dflash={"conv_kernel_size": 4}), "DFlash 2 checkpoint.*conv_kernel_size"),
        (changed(FLAT, selector_rank=64), "DFlash 2 checkpoint.*selector_rank"),
        (changed(SPECULATORS, projector_type="domino"), "only DFlash"),
        (changed(SPECULATORS, speculators_model_type="eagle3"), "only DFlash"),
        (changed(SPECULATORS, sample_from_anchor=True), "slot 0"),
        (changed(SPECULATORS, aux_hidden_state_layer_ids=[0, 3]), "names the embedding"),
        (changed(FLAT, dflash={"use_swa": True}), "use_swa"),
        (changed(FLAT, sliding_window=None), "sliding_window is None"),
        (changed(FLAT, use_sliding_window=False), "use_sliding_window is False"),
        (changed(FLAT, layer_types=LAYERS[:3]), "3 entries for 5 layers"),
        (changed(FLAT, layer_types=["linear_attention"] * 5), "linear_attention"),
        (changed(FLAT, hidden_act="gelu"), "gelu"),
        (changed(FLAT, block_size=0), "block_size must be >= 1, got 0"),
        (changed(FLAT, num_key_value_heads=5), "cannot share"),
        (changed(FLAT, dflash={"target_layer_ids": []}), "target_layer_ids"),
    ],
)
def test_what_is_not_implemented_is_refused(published, message):
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_hf(published)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"hidden_size": 4096}, "drafter hidden size 5120, target has 4096: use the drafter trained"),
        ({"num_layers": 36}, "64 layers, target has 36"),
        ({"vocab_size": 151936}, "mask_token_id 248070, target embedding has 151936"),
        ({"vocab_size": 320000}, "vocabulary 248320, target has 320000"),
    ],
)
def test_the_wrong_target_is_refused_naming_both_sides(target, message):
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_hf(FLAT).check_against(SimpleNamespace(**{**vars(TARGET), **target}))


def test_layer_ids_are_checked_where_the_drafter_does_not_name_its_target():
    config = DrafterConfig.from_hf(changed(FLAT, num_target_layers=None))
    with pytest.raises(
        ValueError, match=r"target_layer_ids \[1, 16, 31, 46, 61\], target has layers 0 to 60"
    ):
        config.check_against(SimpleNamespace(**{**vars(TARGET), "num_layers": 61}))


def test_padding_of_the_vocabulary_is_tolerated():
    DrafterConfig.from_hf(FLAT).check_against(SimpleNamespace(**{**vars(TARGET), "vocab_size": 248077}))
