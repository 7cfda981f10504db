"""DFlash against z-lab's own package (recorded by tests/reference), and what a round may and may not do."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ddtree.models.dflash import DFlash, load_drafter
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.weights import fill

REFERENCE = np.load(Path(__file__).parents[1] / "reference" / "dflash_reference.npz")
CASES = sorted({key.split("/")[0] for key in REFERENCE.files if key.endswith("/config")})


class ReferenceTensors:
    """One recorded weight set as a source for `fill`."""

    def __init__(self, weights: str) -> None:
        self.name = f"dflash_reference.npz/{weights}"
        self.prefix = f"weights/{weights}/"
        names = [key.removeprefix(self.prefix) for key in REFERENCE.files if key.startswith(self.prefix)]
        self.shapes = {name: REFERENCE[self.prefix + name].shape for name in names}

    def read(self, name: str) -> torch.Tensor:
        return torch.from_numpy(REFERENCE[self.prefix + name])


class TinyTarget:
    """A target's embedding and head, which is all that a drafter borrows."""

    def __init__(self, vocab_size: int = 24, num_layers: int = 6) -> None:
        self.head = torch.from_numpy(REFERENCE["head"])
        self.embedding = torch.randn(vocab_size, 16, generator=torch.Generator().manual_seed(3))
        self.config = SimpleNamespace(hidden_size=16, vocab_size=vocab_size, num_layers=num_layers)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


def published_config(case: str) -> dict:
    return json.loads(str(REFERENCE[f"{case}/config"]))


def reference_model(case: str) -> DFlash:
    model = DFlash(DrafterConfig.from_hf(published_config(case)))
    fill(model.checkpoint_tensors(), ReferenceTensors(str(REFERENCE[f"{case}/weights"])))
    return model.eval()


def recorded(case: str, index: int, key: str) -> torch.Tensor:
    return torch.from_numpy(REFERENCE[f"{case}/{index}/{key}"])


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, ratio: float = 1e-5) -> None:
    error = float((actual - expected).abs().max() / expected.abs().max())
    assert error < ratio, f"{name}: relative error {error:.2e}"


def random_features(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(seed))


def random_block(num_slots: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(1, num_slots, 16, generator=torch.Generator().manual_seed(seed))


def rows_of(cache) -> list[torch.Tensor]:
    """The committed rows of every layer."""
    length = cache.context_length
    return [buffer[:, :length].clone() for layer in cache.layers for buffer in (layer._keys, layer._values)]


@pytest.mark.parametrize("case", CASES)
def test_every_round_equals_z_labs_package(case):
    model, target = reference_model(case), TinyTarget()
    cache = model.new_cache()
    for index in range(int(REFERENCE[f"{case}/rounds"])):
        model.absorb(recorded(case, index, "features"), cache)
        hidden = model(recorded(case, index, "embeddings")[None], [cache])[0]
        assert_close(f"round {index} hidden", hidden, recorded(case, index, "hidden"))
        assert_close(f"round {index} logits", model.logits(hidden, target), recorded(case, index, "logits"))


def test_the_reference_covers_windows_causality_and_block_sizes():
    configs = [DrafterConfig.from_hf(published_config(case)) for case in CASES]
    assert {config.block_size for config in configs} == {1, 4, 8}
    assert {(c.attends_causally(0), c.window(0) is not None) for c in configs} == {
        (False, False),
        (True, False),
        (True, True),
        (False, True),
    }


@pytest.mark.parametrize("case", ["full_block8", "sliding_window3", "sliding_bidirectional", "causal_block8"])
def test_absorbing_in_chunks_equals_absorbing_at_once(case):
    model, features = reference_model(case), random_features(23)
    whole, chunked = model.new_cache(), model.new_cache()
    model.absorb(features, whole)
    for chunk in features.split((1, 9, 0, 13)):
        model.absorb(chunk, chunked)
    assert whole.context_length == chunked.context_length == 23
    assert_close(case, model(random_block(), [chunked]), model(random_block(), [whole]))


@pytest.mark.parametrize("case", ["full_block8", "sliding_window3", "sliding_bidirectional"])
def test_a_batch_of_different_contexts_equals_each_alone(case):
    model = reference_model(case)
    caches, blocks = [], torch.cat([random_block(seed=seed) for seed in range(4)])
    for seed, length in enumerate((0, 1, 7, 300)):
        caches.append(model.new_cache())
        model.absorb(random_features(length, seed), caches[-1])
    together = model(blocks, caches)
    for index, cache in enumerate(caches):
        assert_close(f"sequence {index}", together[index], model(blocks[index : index + 1], [cache])[0])


def test_another_sequence_never_leaks_in():
    model = reference_model("sliding_window8")
    caches = [model.new_cache() for _ in range(3)]
    for seed, cache in enumerate(caches):
        model.absorb(random_features(11, seed), cache)
    loud = model.new_cache()
    model.absorb(random_features(11, 1) * 1e3, loud)
    blocks = torch.cat([random_block(seed=seed) for seed in range(3)])
    quiet = model(blocks, caches)
    blocks[1] *= 1e3
    shouted = model(blocks, [caches[0], loud, caches[2]])
    assert torch.equal(quiet[0], shouted[0]) and torch.equal(quiet[2], shouted[2])
    assert not torch.equal(quiet[1], shouted[1])


@pytest.mark.parametrize("case", ["full_block8", "sliding_window8"])
def test_an_aborted_draft_leaves_no_trace(case):
    model, features = reference_model(case), random_features(12)
    drafted, untouched = model.new_cache(), model.new_cache()
    for cache in (drafted, untouched):
        model.absorb(features[:9], cache)
    before = rows_of(drafted)
    model(random_block(seed=5) * 1e3, [drafted])
    assert drafted.context_length == 9
    assert all(torch.equal(a, b) for a, b in zip(before, rows_of(drafted), strict=True))
    for cache in (drafted, untouched):
        model.absorb(features[9:], cache)
    assert torch.equal(model(random_block(), [drafted]), model(random_block(), [untouched]))


def test_a_causal_block_cut_short_is_its_own_beginning():
    model = reference_model("causal_block8")
    cache = model.new_cache()
    model.absorb(random_features(6), cache)
    assert_close("prefix", model(random_block()[:, :3], [cache]), model(random_block(), [cache])[:, :3])


def test_a_bidirectional_block_may_be_short_too():
    model = reference_model("full_block8")
    cache = model.new_cache()
    model.absorb(random_features(6), cache)
    short = model(random_block()[:, :3], [cache])
    assert short.shape == (1, 3, 16)
    assert not torch.allclose(
        short, model(random_block(), [cache])[:, :3]
    )  # later slots are seen by earlier ones


def test_bfloat16_stays_near_float32():
    precise = reference_model("sliding_window8")
    coarse = DFlash(precise.config, dtype=torch.bfloat16)
    fill(coarse.checkpoint_tensors(), ReferenceTensors("gqa"))
    outputs = []
    for model in (precise, coarse):
        cache = model.new_cache()
        model.absorb(random_features(20).to(model.dtype), cache)
        outputs.append(model(random_block().to(model.dtype), [cache]).float())
    assert_close("bfloat16", outputs[1], outputs[0], 5e-2)


def test_the_block_is_the_root_and_masks_embedded_by_the_target():
    target = TinyTarget()
    config = DrafterConfig.from_hf({**published_config("full_block4"), "input_embedding_scale": 2.0})
    model = DFlash(config)
    block = model.embed_block(torch.tensor([0, 7]), target)
    assert block.shape == (2, 4, 16)
    assert torch.equal(block[:, 0], 2 * target.embedding[[0, 7]])
    assert torch.equal(block[:, 1:], 2 * target.embedding[23].expand(2, 3, 16))
    assert model.embed_block(torch.tensor([0]), target, 2).shape == (1, 2, 16)


def test_features_of_the_wrong_width_are_refused():
    model = reference_model("full_block8")
    with pytest.raises(ValueError, match="48 wide, the drafter's fc takes 32"):
        model.absorb(torch.zeros(3, 48), model.new_cache())


def write_checkpoint(folder: Path, config: dict, extra: dict[str, torch.Tensor] | None = None) -> Path:
    source = ReferenceTensors("gqa")
    save_file(
        {name: source.read(name) for name in source.shapes} | (extra or {}), folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def speculators_config(draft_vocab_size: int) -> dict:
    stack = published_config("full_block8")
    dflash = stack.pop("dflash_config")
    return {
        "speculators_model_type": "dflash",
        "transformer_layer_config": stack,
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        "block_size": 8,
        "draft_vocab_size": draft_vocab_size,
    }


def drafted_logits(model: DFlash) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden, logits) of one draft over some context."""
    cache = model.new_cache()
    model.absorb(random_features(6), cache)
    hidden = model(random_block(), [cache])
    return hidden, model.logits(hidden, TinyTarget())


def test_loading_z_labs_layout_gives_the_recorded_output(tmp_path):
    model = load_drafter(write_checkpoint(tmp_path, published_config("full_block8")), TinyTarget().config)
    cache = model.new_cache()
    model.absorb(recorded("full_block8", 0, "features"), cache)
    hidden = model(recorded("full_block8", 0, "embeddings")[None], [cache])[0]
    assert_close("loaded", hidden, recorded("full_block8", 0, "hidden"))


@pytest.mark.parametrize("own_head", [False, True])
def test_a_draft_vocabulary_speaks_the_targets_ids(tmp_path, own_head):
    token_ids = torch.tensor([0, 3, 4, 11, 23])
    extra = {
        "d2t": token_ids - torch.arange(5),
        "t2d": torch.zeros(24, dtype=torch.bool).index_fill(0, token_ids, True),
        "embed_tokens.weight": torch.zeros(24, 16),  # speculators' frozen copy of the target's
    }
    if own_head:
        extra["lm_head.weight"] = TinyTarget().head[token_ids] * 3
    model = load_drafter(write_checkpoint(tmp_path, speculators_config(5), extra), TinyTarget().config)
    hidden, logits = drafted_logits(model)
    assert logits.shape == (1, 8, 24)
    expected = TinyTarget().logits(hidden)[..., token_ids] * (3 if own_head else 1)
    assert_close("draft tokens", logits[..., token_ids], expected)
    others = [i for i in range(24) if i not in token_ids]
    assert torch.all(logits[..., others] == -torch.inf)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "d2t: missing"),
        ({"d2t": torch.zeros(4, dtype=torch.int64)}, "expected 5 draft tokens, checkpoint has 4"),
        ({"d2t": torch.tensor([0, -1, 0, 0, 0])}, "repeat"),
        ({"d2t": torch.full((5,), 20)}, "maps to token 24"),
        (
            {"d2t": torch.zeros(5, dtype=torch.int64), "t2d": torch.arange(24) >= 19},
            "d2t and t2d name different tokens",
        ),
    ],
)
def test_a_broken_draft_vocabulary_is_refused(tmp_path, extra, message):
    folder = write_checkpoint(tmp_path, speculators_config(5), extra)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, TinyTarget().config)


def test_a_drafter_of_another_width_is_refused_naming_both(tmp_path):
    folder = write_checkpoint(tmp_path, published_config("full_block8"))
    target = SimpleNamespace(hidden_size=576, vocab_size=24, num_layers=6)
    with pytest.raises(
        ValueError, match="drafter hidden size 16, target has 576: use the drafter trained for"
    ):
        load_drafter(folder, target)


def test_tensors_left_over_or_missing_are_named(tmp_path):
    config, target = published_config("full_block8"), TinyTarget().config
    folder = write_checkpoint(tmp_path, config, {"layers.0.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.sinks"):
        load_drafter(folder, target)
    write_checkpoint(tmp_path, {**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    with pytest.raises(ValueError, match=r"layers\.2\.\S+: missing"):
        load_drafter(folder, target)
    write_checkpoint(tmp_path, {**config, "intermediate_size": 32})
    with pytest.raises(
        ValueError, match=r"gate_proj\.weight: expected \[32, 16\], checkpoint has \[24, 16\]"
    ):
        load_drafter(folder, target)


def test_a_missing_path_or_config_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_drafter(tmp_path / "nowhere", TinyTarget().config)
    (write_checkpoint(tmp_path, {}) / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_drafter(tmp_path, TinyTarget().config)
